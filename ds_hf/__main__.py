"""``python -m ds_hf`` is ``ds-hf``."""

from ds_hf.cli import main

if __name__ == "__main__":
    main()
