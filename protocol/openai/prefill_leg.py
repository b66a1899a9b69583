"""What a proxy and a prefill server tell each other about the request behind a prefill."""

from typing import Any

# The field's convention: a prefill server is told by this object that it prefills only.
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

RELEASE_PATH = "/release_kv"  # of a server: nobody will come for the KV of `kv_transfer_params`

# Members that a proxy changes for the prefill leg: it repeats the client's own in `client_request`.
CLIENT_MEMBERS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stream",
    "stream_options",
)


def client_request(body: dict[str, Any]) -> dict[str, Any] | None:
    """The request behind a prefill leg as the client made it; None where the proxy did not say."""
    params = body.get("kv_transfer_params")
    asked = params.get("client_request") if isinstance(params, dict) else None
    if not isinstance(asked, dict):
        return None
    hidden = (*CLIENT_MEMBERS, "kv_transfer_params")
    kept = {name: value for name, value in body.items() if name not in hidden}
    return kept | {name: asked[name] for name in CLIENT_MEMBERS if name in asked}


def decode_context(body: dict[str, Any]) -> int | None:
    """The longest context of the decode servers behind a prefill leg, where the proxy said it."""
    params = body.get("kv_transfer_params")
    length = params.get("max_model_len") if isinstance(params, dict) else None
    return length if type(length) is int and length > 0 else None
