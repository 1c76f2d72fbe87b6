"""Libraries that compute the attention of prompts instead of this project's kernels."""
