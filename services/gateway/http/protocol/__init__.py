"""What uvicorn's protocol for HTTP/1.1 lacks."""
