"""Take secrets out of a configuration before it is written down: by the names of keys, and by what texts look like."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "not recorded"
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRET = re.compile(
    "secrets?|passwords?|passwd|pwd|passphrase|credentials?|auth|authorization|cookies?|bearer|apikeys?|headers?"
)
_SECRET_LAST = frozenset({"key", "keys", "token"})
_ENVIRONMENT = frozenset({"env", "env_vars", "environ", "environment"})
_LOOKS_SECRET = re.compile(
    r"\b(?:(?:hf|gh[oprsu])_[A-Za-z0-9]{16,}|github_pat_\w{16,}|(?:sk[-_]|glpat-|xox[a-z]-)[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|(?:Bearer|Basic) +[\w\-+/=.~]{16,})",
    re.ASCII,
)
_ARGUMENT = re.compile(r"(?<![\w./-])(--[A-Za-z][\w.-]* +|-{0,2}[A-Za-z_][\w.-]*=)([^\s,;&]+)")
_LOGIN = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"(?<=\w)\?[^\s]*")


def without_secrets(value: Any, key: str = "") -> Any:
    """`value` as JSON values, texts under the keys of secrets replaced. Environment variables keep their names only.

    A command line keeps the names of such arguments: `--api-key VALUE`, `api_key=VALUE`, `["--api-key", "VALUE"]`.
    A URL loses its login and its query, and what looks like a key of a known service is replaced wherever it is.
    Objects other than JSON's are named by their type, since their text might hold anything.

    >>> without_secrets({"hf_token": "hf_abc", "kv_tokens": 64, "env_vars": {"HOME": "/home/me"}, "url": "http://me:pw@gpu/v1"})
    {'hf_token': 'not recorded', 'kv_tokens': 64, 'env_vars': {'HOME': 'not recorded'}, 'url': 'http://gpu/v1'}
    """
    if isinstance(value, Mapping):
        hide = key.lower() in _ENVIRONMENT or is_secret(key)
        return {str(name): HIDDEN if hide else without_secrets(each, str(name)) for name, each in value.items()}
    if value is None or isinstance(value, bool):
        return value
    several = isinstance(value, list | tuple | set | frozenset)
    if is_secret(key) or (several and key.lower() in _ENVIRONMENT):  # ["NAME=value"], as containers take them
        return HIDDEN
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if several:
        items = list(value)
        return [
            without_secrets(each, _flag(before) or key) for before, each in zip([None, *items], items, strict=False)
        ]
    if isinstance(value, str | float):
        return _clean(str(value))
    return f"<{type(value).__name__}>"


def is_secret(key: str) -> bool:
    """Whether a key of this name holds a secret: api_key, hf_token, dbPassword; not kv_tokens or eos_token_id."""
    words = [word.lower() for word in _WORDS.findall(key)]
    return any(_SECRET.fullmatch(word) for word in words) or bool(words and words[-1] in _SECRET_LAST)


def _flag(before: Any) -> str:
    """The text before this item of a list, if it names a secret argument: `--api-key`."""
    return before if isinstance(before, str) and before.startswith("--") and is_secret(before) else ""


def _clean(text: str) -> str:
    text = _ARGUMENT.sub(lambda found: found[1] + HIDDEN if is_secret(found[1]) else found[0], text)
    if "://" in text:
        text = _QUERY.sub("", _LOGIN.sub("", text))
    return _LOOKS_SECRET.sub(HIDDEN, text)
