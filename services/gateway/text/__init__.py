"""Text processing: template, tokenizer, detokenizer, stop strings. Pure, without torch."""
