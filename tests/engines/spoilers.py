"""Changes to an engine's replies, in vLLM's shapes and SGLang's, whole or streamed."""

import json

ID_LISTS = {"token_ids", "output_ids", "response_token_ids"}


def editing(change):
    """The edit that applies `change` to the JSON of a reply, and to that of each event."""

    def edit(text):
        if not text.startswith(b"data:"):
            return json.dumps(change(json.loads(text))).encode()
        return b"\n\n".join(
            b"data: " + json.dumps(change(json.loads(line[6:]))).encode()
            if line.startswith(b"data: {")
            else line
            for line in text.split(b"\n\n")
        )

    return edit


def walked(value, field, change):
    """`value` with each object's fields mapped by `field`, each item of a list by `change`."""
    if isinstance(value, dict):
        return {key: field(key, one) for key, one in value.items()}
    return [change(one) for one in value] if isinstance(value, list) else value


def each_token(*, token=lambda id_: id_, logprob=lambda value: value, times=1):
    """The edit that maps each sampled id and logprob, and repeats the tokens."""

    def named(name):
        return f"token_id:{token(int(name.removeprefix('token_id:')))}"

    def entry(one):
        changed = {**one, "logprob": logprob(one["logprob"])}
        if str(one.get("token")).startswith("token_id:"):
            changed["token"] = named(one["token"])
        if one.get("token_id") is not None:
            changed["token_id"] = token(one["token_id"])
        return changed

    lists = {
        **dict.fromkeys(ID_LISTS, token),
        "output_token_logprobs": lambda one: [logprob(one[0]), token(one[1]), one[2]],
        "content": entry,
        "token_logprobs": logprob,
        "tokens": named,
    }

    def field(key, one):
        if key in lists and isinstance(one, list):
            return [lists[key](item) for item in one] * times
        return one * times if key == "completion_tokens" else change(one)

    def change(value):
        return walked(value, field, change)

    return editing(change)


def prompt_ids(become):
    """The edit that maps the list of the prompt's ids; `None` empties it."""

    def field(key, one):
        return become(one) if key == "prompt_token_ids" and one is not None else change(one)

    def change(value):
        return walked(value, field, change)

    return editing(change)
