"""Training of the demo model, one noun a file; ``scripts/train_demo_model.py`` is the door.

Shape letters: B rows of a batch, T positions, D hidden size, H query heads, K key and value heads,
C channels of one head, V vocabulary. One ``random.Random`` is drawn from in a fixed order by
everything that makes training text, so that a seed names one training run.
"""
