"""LangChain's agent on LangGraph with a memory; the first argument names the model class.

With `summary`, its middleware replaces the first question's messages by a summary.
"""

import sys

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from tasks import ANTHROPIC, MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

MODELS = {
    "chat": lambda: ChatOpenAI(model=MODEL, use_responses_api=False, **OPENAI),
    "responses": lambda: ChatOpenAI(model=MODEL, use_responses_api=True, **OPENAI),
    "anthropic": lambda: ChatAnthropic(model=MODEL, max_tokens=2000, **ANTHROPIC),
}
model = MODELS[sys.argv[1]]()
summary = SummarizationMiddleware(model, trigger=("messages", 10), keep=("messages", 2))
agent = create_agent(
    model,
    tools=[population, add],
    system_prompt=SYSTEM,
    middleware=[summary] if "summary" in sys.argv else [],
    checkpointer=InMemorySaver(),
)
for question in QUESTIONS:
    state = agent.invoke(
        {"messages": [{"role": "user", "content": question}]},
        {"configurable": {"thread_id": "1"}},
    )
print(state["messages"][-1].text)
