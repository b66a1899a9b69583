"""The legs of a request: how they are sent to servers, and how answers are handled."""
