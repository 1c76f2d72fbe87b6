"""Names the options by which a route tells the admission how to treat its requests."""

BODY_KIND = "body_kind"  # how its large bodies are prepared
MODEL_OF = "model_of"  # reads the model from the scope, where bodies name none
RAW = "raw"  # a body kind: the handler prepares large bodies itself
TAKES_IMAGES = "takes_images"  # its bodies may be as large as images are
IS_FREE = "is_free"  # it renders, tokenizes and writes nothing
