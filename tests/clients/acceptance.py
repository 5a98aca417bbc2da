"""A check for Schemathesis, which loads it as its hooks: what the description allows is answered, or refused for one of the reasons that a
description of all models cannot give. Each of them is a pattern of the refusal's message; any other 400 is a failure."""

import json
import re

import schemathesis
from schemathesis import GenerationMode

REASONS = {
    "what one model has and another has not": [
        r"expected token ids below \d+, found",
        r"expected at most \d+ tokens \(the context\)",
        r"this model's chat template",
        r"^dimensions: ",
        r"^chat_template_kwargs\.",
    ],
    "texts that have no tokens": [r"expected at least one token, found none"],
    "fields that do not go together": [
        r"^max_tokens: expected this or max_completion_tokens, found both",
        r"^top_logprobs: expected ",
        r"^stream_options: ",
        r"^(reasoning_effort|reasoning\.effort|thinking_budget|thinking\.budget_tokens): expected ",
        r"^best_of: ",
        r"^echo: ",
    ],
    "conversations that nobody can answer": [
        r"expected the user or a tool to speak last",
        r"expected at least one message, found none",
        r"expected a text or tool_calls",
        r"not supported but beside content, which is what the model is told",
    ],
    "more choices than the server has room for": [r"expected at most \d+ (choices|inputs) in all"],
}
PATTERNS = [re.compile(pattern) for patterns in REASONS.values() for pattern in patterns]


@schemathesis.check
def what_is_allowed_is_accepted(ctx, response, case):
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE or response.status_code != 400:
        return None
    message = json.loads(response.content)["error"]["message"]
    assert any(pattern.search(message) for pattern in PATTERNS), f"the description allows what is refused: {message}"
    return None
