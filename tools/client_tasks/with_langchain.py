"""LangChain's two models: arguments are the address, the model's name and a question; prints what it got as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

url, model, question = sys.argv[1:]
settings = {"base_url": url + "/v1", "api_key": "none", "model": model, "temperature": 0, "max_tokens": 8}
chat, plain = ChatOpenAI(**settings), OpenAI(**settings)
print(
    json.dumps(
        {
            "chat": chat.invoke(question).content,
            "chat_stream": "".join(str(part.content) for part in chat.stream(question)),
            "completion": plain.invoke(question),
            "completion_stream": "".join(plain.stream(question)),
        }
    )
)
