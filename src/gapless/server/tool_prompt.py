"""Tools for a model whose chat template has no place for them: written into the conversation, in the form of Hermes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_TEXT = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call return a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <object>}}
</tool_call>"""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message, and earlier calls and their results as text."""
    text = _TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    written = [_plain(message) for message in messages]
    if written and written[0]["role"] == "system":
        first = written[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    for call in calls:
        parts.append(f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>")
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": "\n".join(parts)}
