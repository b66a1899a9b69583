"""The legs of a request: what is sent to servers, and what their answers mean."""
