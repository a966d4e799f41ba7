"""OpenAI's own client: arguments are the address, the model's name and a question; prints what it got as JSON."""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

url, model, question = sys.argv[1:]
SETTINGS = {"model": model, "temperature": 0, "max_tokens": 8}
TALK = [{"role": "user", "content": question}]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
found = {"models": [card.id for card in client.models.list()]}
found["completion"] = client.completions.create(prompt=question, **SETTINGS).choices[0].text
chunks = client.completions.create(prompt=question, stream=True, **SETTINGS)
found["completion_stream"] = "".join(chunk.choices[0].text for chunk in chunks)
found["chat"] = client.chat.completions.create(messages=TALK, **SETTINGS).choices[0].message.content
parts = list(
    client.chat.completions.create(messages=TALK, stream=True, stream_options={"include_usage": True}, **SETTINGS)
)
found["chat_stream"] = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
found["usage"] = parts[-1].usage.completion_tokens


async def later() -> str:
    """The same with the asynchronous client."""
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as own:
        parts = await own.chat.completions.create(messages=TALK, stream=True, **SETTINGS)
        return "".join([part.choices[0].delta.content or "" async for part in parts])


class City(BaseModel):
    """What is asked for."""

    name: str
    large: bool


found["chat_async"] = asyncio.run(later())
parsed = (
    client.chat.completions.parse(messages=TALK, response_format=City, model=model, temperature=0, max_tokens=60)
    .choices[0]
    .message.parsed
)
found["parsed"] = isinstance(parsed, City)
found["response"] = client.responses.create(model=model, input=question, temperature=0, max_output_tokens=8).output_text
print(json.dumps(found))
