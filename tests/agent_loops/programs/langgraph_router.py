"""A LangGraph router: a structured decision, then an agent, on the same messages."""

from typing import Literal

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population


class Route(BaseModel):
    """The specialist that answers."""

    specialist: Literal["cities", "rivers"]


model = ChatOpenAI(model=MODEL, use_responses_api=False, **OPENAI)
agents = {
    name: create_agent(model, tools=[population, add], system_prompt=SYSTEM, name=name)
    for name in ("cities", "rivers")
}


def route(state: MessagesState) -> str:
    return model.with_structured_output(Route).invoke(state["messages"]).specialist


graph = StateGraph(MessagesState)
for name, agent in agents.items():
    graph.add_node(name, agent)
    graph.add_edge(name, END)
graph.add_conditional_edges(START, route, list(agents))
messages = []
for question in QUESTIONS:
    messages = [*messages, {"role": "user", "content": question}]
    messages = graph.compile().invoke({"messages": messages})["messages"]
print(messages[-1].text)
