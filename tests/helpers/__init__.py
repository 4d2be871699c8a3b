"""What several tests share: running code on several processes."""
