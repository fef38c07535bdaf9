"""DSPy's ReAct module, whose prompts are texts of its own."""

import os

import dspy
from tasks import MODEL, OPENAI, QUESTIONS, add, population

model = dspy.LM(
    f"openai/{MODEL}", api_base=OPENAI["base_url"], api_key=OPENAI["api_key"], cache=False
)
dspy.configure(lm=model)
os.environ.setdefault("DSPY_CACHEDIR", os.environ["HOME"])
agent = dspy.ReAct("question -> answer", tools=[population, add], max_iters=5)
print(agent(question=QUESTIONS[0]).answer)
