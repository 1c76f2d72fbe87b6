"""A process of templates with a tenth of their time: `python -m …`."""

from services.gateway.preparation.template_process import main
from services.gateway.text import process_jobs

process_jobs.LIMIT_S /= 10

if __name__ == "__main__":
    main()
