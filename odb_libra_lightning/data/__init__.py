"""Data for training: the DataModule, datasets and collators."""
