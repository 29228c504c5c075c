"""The command line: `train.py` and `odb-libra`, and the recipes they read."""
