"""Where the time of each step goes, rank by rank: ``"ds_hf": {"report": "folder"}``.

``spans`` says what is told apart, ``recorder`` notes it, ``wiring`` puts it on a finished engine, ``files`` keeps it,
``header`` tells what ran. Without the key none of it is imported. ``ds_hf/profile`` reads the folder.
"""
