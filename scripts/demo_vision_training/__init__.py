"""The parts of ``scripts/train_demo_vision.py``."""
