"""Train a recipe: `python train.py --config recipes/quickstart.yaml [key=value ...]`."""

from odb_libra_lightning.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
