"""The Python packages `openai` and `anthropic`: every endpoint as its package asks it."""

import asyncio

import anthropic
import openai
from run import check

ASK = [{"role": "user", "content": "show the ten largest files under src"}]
TOOL = {"name": "weather", "description": "How the weather is", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def refused(what, error, ask, word):
    try:
        ask()
    except error as refusal:
        check(what, word in str(refusal), refusal)
    else:
        check(what, False, "an answer")


def openai_package(url, model):
    client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    ok = lambda what, is_true, found: check(f"openai, {model}: {what}", is_true, found)
    names = [m.id for m in client.models.list()]
    ok("models", model in names and client.models.retrieve(model).id == model, names)

    common = {"model": model, "messages": ASK, "seed": 1, "max_completion_tokens": 60}
    whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=3)
    choice = whole.choices[0]
    said = choice.message.content
    ok("chat", said and whole.usage.completion_tokens > 3 and choice.finish_reason in ("stop", "length"), whole)
    tokens = choice.logprobs.content
    ok("log-probabilities", all(t.logprob <= 0 and len(t.top_logprobs) == 3 for t in tokens), tokens)
    text = b"".join(bytes(t.bytes) for t in tokens).decode(errors="replace")
    ok("their bytes are the text's", said in text, text)
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    ok("chat, streamed", streamed == said, streamed)
    usage = chunks[-1].usage
    ok("usage and cached tokens", usage.prompt_tokens_details.cached_tokens > 0, usage)
    with client.chat.completions.stream(**common) as stream:
        final = stream.get_final_completion()
    ok("chat, through the package's own helper", final.choices[0].message.content == said, final)
    several = client.chat.completions.create(**common | {"n": 3, "temperature": 1.0})
    ok("several choices", [c.index for c in several.choices] == [0, 1, 2], several)
    talk = ASK + [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "and the oldest"}]
    after = client.chat.completions.create(**common | {"messages": talk})
    # The built-in model looks at the last message alone.
    longer = lambda after, before: model == "default" or after > before
    ok("what was said goes back in", after.choices and longer(after.usage.prompt_tokens, whole.usage.prompt_tokens), after)

    text = client.completions.create(model=model, prompt="list files", max_tokens=8, seed=1, echo=True, logprobs=2)
    ok("completions", text.choices[0].text.startswith("list files"), text)
    chunks = list(client.completions.create(model=model, prompt="list files", max_tokens=8, seed=1, stream=True))
    streamed = "".join(c.choices[0].text for c in chunks if c.choices)
    ok("completions, streamed", "list files" + streamed == text.choices[0].text, streamed)
    ids = client.completions.create(model=model, prompt=[[5, 6, 7], [8, 9]], max_tokens=2, n=2, seed=1)
    ok("completions of token ids", len(ids.choices) == 4, ids)

    again = {"model": model, "max_output_tokens": 60, "seed": 1}
    first = client.responses.create(input="how much disk space is free", **extra(again))
    ok("responses", first.output_text and first.status in ("completed", "incomplete"), first)
    same = client.responses.retrieve(first.id)
    ok("responses, looked at again", same.output_text == first.output_text, same)
    after = client.responses.create(input="and memory", previous_response_id=first.id, **extra(again))
    ok("responses, gone on with", after.output and longer(after.usage.input_tokens, first.usage.input_tokens), after)
    with client.responses.stream(input="how much disk space is free", **extra(again)) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response() if names[-1] == "response.completed" else None
    ok("responses, streamed", names[-1] in ("response.completed", "response.incomplete"), names)
    ok("responses, streamed as whole", final is None or final.output_text == first.output_text, final)

    vectors = client.embeddings.create(model=model, input=["list files", "free memory"])
    length = sum(x * x for x in vectors.data[0].embedding)
    ok("embeddings (in base64, as the package asks)", abs(length - 1) < 1e-4, length)
    floats = client.embeddings.create(model=model, input="list files", encoding_format="float")
    ok("embeddings as numbers", floats.data[0].embedding == vectors.data[0].embedding, floats)

    create = client.chat.completions.create
    refused(f"openai, {model}: too hot", openai.BadRequestError, lambda: create(**common, temperature=1000.0), "temperature")
    refused(f"openai, {model}: another model", openai.NotFoundError, lambda: create(**common | {"model": "other"}), "other")
    refused(f"openai, {model}: grammars", openai.BadRequestError,
            lambda: create(**common, response_format={"type": "json_object"}), "response_format")
    tools = {"tools": [{"type": "function", "function": TOOL}]}
    if model == "hybrid":
        ok("tools", create(**common, **tools).choices[0].finish_reason in ("stop", "length", "tool_calls"), "")
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
        result = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "rain"}]
        ok("results of tools", create(**common | {"messages": ASK + result}, **tools).choices, "")
    else:
        refused(f"openai, {model}: tools", openai.BadRequestError, lambda: create(**common, **tools), "tools")
    asyncio.run(in_parallel(url, common, said))


def extra(fields):
    """What the package has no name for goes beside it."""
    return {"model": fields["model"], "max_output_tokens": fields["max_output_tokens"], "extra_body": {"seed": fields["seed"]}}


async def in_parallel(url, common, said):
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    answers = await asyncio.gather(*(client.chat.completions.create(**common) for _ in range(12)))
    check(f"openai, {common['model']}: twelve at once say the same", all(a.choices[0].message.content == said for a in answers), answers)


def anthropic_package(url, model):
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    ok = lambda what, is_true, found: check(f"anthropic, {model}: {what}", is_true, found)
    # The package has no name for it any more.
    common = {"model": model, "messages": ASK, "max_tokens": 60, "extra_body": {"temperature": 0.0}}
    whole = client.messages.create(**common)
    said = "".join(b.text for b in whole.content if b.type == "text")
    ok("messages", said and whole.stop_reason in ("end_turn", "max_tokens"), whole)
    with client.messages.stream(**common) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    ok("messages, streamed", streamed == said and final.usage.output_tokens == whole.usage.output_tokens, final)
    events = [e.type for e in client.messages.create(**common, stream=True)]
    ok("their events", (events[0], events[-1]) == ("message_start", "message_stop"), events)
    count = client.messages.count_tokens(model=model, messages=ASK)
    usage = whole.usage
    ok("count_tokens", count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (count, usage))
    stopped = client.messages.create(**common, stop_sequences=[said[3:6]])
    ok("stop sequences", (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", said[3:6]), stopped)
    talk = ASK + [{"role": "assistant", "content": whole.content}, {"role": "user", "content": "and the oldest"}]
    after = client.messages.create(**common | {"messages": talk}, system=[{"type": "text", "text": "Be brief."}])
    all_of_it = after.usage.input_tokens + after.usage.cache_read_input_tokens
    ok("what was said goes back in", model == "default" or all_of_it > count.input_tokens, after)
    names = [m.id for m in client.models.list()]
    ok("models", model in names, names)
    refused(f"anthropic, {model}: top_k", anthropic.BadRequestError, lambda: client.messages.create(**common | {"extra_body": {"top_k": -1}}), "top_k")
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    if model == "hybrid":
        ok("tools", client.messages.create(**common, tools=[tool]).stop_reason in ("end_turn", "max_tokens", "tool_use"), "")
        use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ulm"}}
        talk = ASK + [{"role": "assistant", "content": [use]}]
        talk += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "rain"}]}]
        ok("results of tools", client.messages.create(**common | {"messages": talk}, tools=[tool]).content, "")
        thought = client.messages.create(**common, thinking={"type": "enabled"})
        ok("thinking", thought.content[0].type == "thinking", thought)
