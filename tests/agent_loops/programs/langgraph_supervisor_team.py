"""A LangGraph supervisor that hands work to one agent and takes it back."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph_supervisor import create_supervisor
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

model = ChatOpenAI(model=MODEL, use_responses_api=False, **OPENAI)
worker = create_agent(model, tools=[population, add], system_prompt=SYSTEM, name="counter")
team = create_supervisor(
    [worker], model=model, prompt="You lead a team. Let the counter count."
).compile()
state = team.invoke({"messages": [{"role": "user", "content": QUESTIONS[0]}]})
print(state["messages"][-1].text)
