"""What ``ds-hf doctor`` tells of a machine and of what is installed on it: ``examine``.

How it works is in docs/design/tools.md.
"""

from ds_hf.doctor.report import Fact, Operator, Report, examine, take_part

__all__ = ["Fact", "Operator", "Report", "examine", "take_part"]
