"""Whether the hub can be reached, asked once and quickly, before a library that would ask for long.

The hub's client tries six times over half a minute where there is no network. Offline it answers
at once, from its cache if that has the file.
"""

import os
import socket
from urllib.parse import urlsplit

HUB = "https://huggingface.co"
PATIENCE = 3.0  # seconds


def go_offline_without_network() -> None:
    """Set HF_HUB_OFFLINE if the hub cannot be reached; call it before Transformers is imported.

    What a user has set is left alone. Behind a proxy, which alone knows, nothing is decided.
    """
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    if "HF_HUB_OFFLINE" in os.environ or any(os.environ.get(name) for name in proxies):
        return
    if not reachable(os.environ.get("HF_ENDPOINT") or HUB):
        os.environ["HF_HUB_OFFLINE"] = "1"


def reachable(address: str, timeout: float = PATIENCE) -> bool:
    """Whether something listens at an address.

    Args:
        address: such as "https://huggingface.co".
        timeout: in seconds.

    Example:
        >>> reachable("http://127.0.0.1:9")
        False
    """
    found = urlsplit(address)
    port = found.port or (80 if found.scheme == "http" else 443)
    try:
        with socket.create_connection((found.hostname or address, port), timeout):
            return True
    except OSError:
        return False
