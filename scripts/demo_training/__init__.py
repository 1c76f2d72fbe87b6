"""Training of the demo model; the entry point is ``scripts/train_demo_model.py``.

Shape letters: B rows of a batch, T positions, D hidden size, H query heads, K key and value heads,
C channels of one head, V vocabulary. All code that makes training text draws from one
``random.Random`` in a fixed order, so that a seed determines a training run.
"""
