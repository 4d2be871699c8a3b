"""What ``ds-hf doctor`` tells of a machine and of what is installed on it: ``examine``.

How it works is in docs/design/tools.md.
"""

from ds_hf.doctor.report import DoctorReport, Fact, Operator, examine, take_part

__all__ = ["DoctorReport", "Fact", "Operator", "examine", "take_part"]
