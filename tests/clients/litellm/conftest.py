import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices are not fetched
