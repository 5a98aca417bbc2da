#!/usr/bin/env python3
"""Real clients against `loaf serve`: the Python packages `openai` and `anthropic`, on the built-in model.

    python3 -m venv /tmp/clients && /tmp/clients/bin/pip install openai anthropic
    /tmp/clients/bin/python tests/serve_clients.py [PROGRAM]

PROGRAM is target/release/loaf unless it is named. Every endpoint is asked as its package asks it, whole and streamed, and answers of the two
ways are compared. Not part of `make test`: the packages come from elsewhere.
"""

import re
import subprocess
import sys
from pathlib import Path


def start(program):
    """The server and its address."""
    args = [program, "serve", "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(args, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if found := re.search(r"http://\S+", line):
            return server, found.group()
    raise SystemExit("the server did not start")


def check(what, is_true, found):
    if not is_true:
        raise SystemExit(f"{what}: {found}")
    print(f"ok: {what}")


def with_openai(url):
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    models = [m.id for m in client.models.list()]
    check("models", models == ["default"], models)
    ask = [{"role": "user", "content": "show the ten largest files under src"}]
    common = {"model": "default", "messages": ask, "seed": 1, "max_completion_tokens": 60}
    whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=3)
    said = whole.choices[0].message.content
    check("chat", said and whole.usage.completion_tokens > 3 and whole.choices[0].finish_reason == "stop", whole)
    tokens = whole.choices[0].logprobs.content
    check("log-probabilities", all(t.logprob <= 0 and len(t.top_logprobs) == 3 for t in tokens), tokens)
    stream = client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check("chat, streamed", streamed == said, streamed)
    usage = chunks[-1].usage
    check("usage and cached tokens", usage.prompt_tokens_details.cached_tokens > 0, usage)
    several = client.chat.completions.create(**common | {"n": 2, "temperature": 1.0})
    check("several choices", len(several.choices) == 2, several)
    text = client.completions.create(model="default", prompt="list files", max_tokens=8, seed=1, echo=True, logprobs=2)
    check("completions", text.choices[0].text.startswith("list files"), text)
    first = client.responses.create(model="default", input="how much disk space is free", max_output_tokens=60, seed=1)
    check("responses", first.output_text and first.status == "completed", first)
    after = client.responses.create(model="default", input="and memory", previous_response_id=first.id, max_output_tokens=60, seed=1)
    check("responses, gone on with", after.usage.input_tokens > first.usage.input_tokens, after)
    with client.responses.stream(model="default", input="how much disk space is free", max_output_tokens=60) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    check("responses, streamed", final.output_text == first.output_text and names[-1] == "response.completed", names)
    vectors = client.embeddings.create(model="default", input=["list files", "free memory"])
    length = sum(x * x for x in vectors.data[0].embedding)
    check("embeddings (in base64, as the package asks)", abs(length - 1) < 1e-4, length)
    for wrong, error in [({"temperature": 1000.0}, openai.BadRequestError), ({"model": "other"}, openai.NotFoundError)]:
        try:
            client.chat.completions.create(**common | wrong)
            raise SystemExit(f"{wrong}: expected a refusal")
        except error as refusal:
            check(f"refusal of {wrong}", next(iter(wrong)) in str(refusal), refusal)


def with_anthropic(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    ask = [{"role": "user", "content": "show the ten largest files under src"}]
    common = {"model": "default", "messages": ask, "max_tokens": 60}
    whole = client.messages.create(**common)
    check("messages", whole.content[0].text and whole.stop_reason == "end_turn", whole)
    with client.messages.stream(**common) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    check("messages, streamed", streamed == whole.content[0].text and final.usage.output_tokens > 0, final)
    count = client.messages.count_tokens(model="default", messages=ask)
    usage = whole.usage
    check("count_tokens", count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (count, usage))
    stopped = client.messages.create(**common, stop_sequences=[whole.content[0].text[3:6]])
    check("stop sequences", stopped.stop_reason == "stop_sequence", stopped)
    try:
        client.messages.create(**common, top_k=-1)
        raise SystemExit("expected a refusal")
    except anthropic.BadRequestError as refusal:
        check("refusal", "top_k" in str(refusal), refusal)


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parents[1] / "target/release/loaf")
    for package in ["openai", "anthropic"]:
        try:
            __import__(package)
        except ImportError:
            raise SystemExit(f"the package {package} is not here: pip install openai anthropic")
    server, url = start(program)
    try:
        with_openai(url)
        with_anthropic(url)
    finally:
        server.terminate()
    check("the server ends well", server.wait(timeout=60) == 0, server.returncode)


if __name__ == "__main__":
    main()
