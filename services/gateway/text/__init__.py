"""Converts between text and tokens: template, tokenizer, detokenizer, stop strings. No I/O, no
torch.
"""
