"""Chat templates: untrusted Jinja text, rendered in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvx.errors import KvxError


def _fail(message: str) -> None:
    """What templates call to reject a conversation."""
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without HTML escapes, which is what chat templates expect of ``tojson``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(form: str) -> str:
    """Today's date in strftime format."""
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """Template compiled in an immutable sandbox, with the filters and the ``generation`` block that templates use."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks assistant text for training; for rendering it is its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_fail, strftime_now=_now)
    return environment.from_string(template)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Render a conversation with a model's chat template.

    Args:
        template: Jinja source.
        messages: ``[{"role": ..., "content": ...}, ...]``.
        add_generation_prompt: end with the header of the assistant's turn.
        **variables: further names the template may read (``bos_token``, ``tools``, ...).

    Raises:
        KvxError: malformed messages, or the template rejects them or cannot be read.

    Example:
        >>> from kvx.models.chat import render_chat
        >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> render_chat(template, [{"role": "user", "content": "Hi"}])
        '<user>Hi'
    """
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    good = not isinstance(messages, str | Mapping) and all(isinstance(m, Mapping) and "role" in m for m in messages)
    if not good or not messages:
        raise KvxError(
            "a chat is a non-empty list of messages such as {'role': 'user', 'content': 'Hi'}; "
            f"got {messages!r:.80}; wrap the text in such a message."
        )
    try:
        return _compiled(template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **variables
        )
    except TemplateSyntaxError as error:
        raise KvxError(f"the chat template cannot be parsed: {error.message} (line {error.lineno}).") from None
    except SecurityError as error:
        raise KvxError(f"the chat template tried something unsafe and was stopped: {error.message}.") from None
    except TemplateError as error:
        raise KvxError(f"the chat template rejects these messages: {error.message}.") from None
    except Exception as error:  # a template is a program: it can fail in any way
        raise KvxError(
            f"the chat template failed on these messages ({type(error).__name__}: {error}); check roles and contents."
        ) from error
