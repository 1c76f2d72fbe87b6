"""Adds to uvicorn's protocol for HTTP/1.1 what it lacks."""
