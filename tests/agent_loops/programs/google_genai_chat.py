"""Automatic function calls of Google's Python SDK, in a chat."""

from google import genai
from google.genai import types
from tasks import GOOGLE, MODEL, QUESTIONS, SYSTEM, add, population

options = types.HttpOptions(base_url=GOOGLE["base_url"])
client = genai.Client(api_key=GOOGLE["api_key"], http_options=options)
config = types.GenerateContentConfig(system_instruction=SYSTEM, tools=[population, add])
chat = client.chats.create(model=MODEL, config=config)
for question in QUESTIONS:
    answer = chat.send_message(question)
print(answer.text)
