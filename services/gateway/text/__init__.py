"""Text in and out: template, tokenizer, detokenizer, stop strings. Pure, torch-free."""
