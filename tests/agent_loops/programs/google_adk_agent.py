"""Google's Agent Development Kit with an in-memory session."""

import asyncio
import os

os.environ["GOOGLE_GEMINI_BASE_URL"] = os.environ["URL_GOOGLE"]
os.environ["GOOGLE_API_KEY"] = os.environ["KEY"]
os.environ["GOOGLE_GENAI_USE_VERTEXAI"] = "0"

from google.adk.agents import Agent
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner
from google.genai import types
from tasks import MODEL, QUESTIONS, SYSTEM, add, population


async def main():
    agent = Agent(
        name="counter", model=Gemini(model=MODEL), instruction=SYSTEM, tools=[population, add]
    )
    async with InMemoryRunner(agent, app_name="cities") as runner:
        session = await runner.session_service.create_session(app_name="cities", user_id="1")
        for question in QUESTIONS:
            content = types.Content(role="user", parts=[types.Part(text=question)])
            async for event in runner.run_async(
                user_id="1", session_id=session.id, new_message=content
            ):
                last = event
    print(last.content.parts[-1].text)


asyncio.run(main())
