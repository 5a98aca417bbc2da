"""The default model in plain PyTorch: qwen3_next in miniature, twice.

`forward` is the training path: many short sequences packed into rows, the gated delta rule in chunks.
`Decoder` is the other one: token by token with explicit state, the recurrence as it is defined. The two check each other.

What always holds: parameter names and layouts are those of the Hugging Face checkpoint (experts stacked here, split on
export); all RMS norms but the DeltaNet output norm store an offset from one; a packed sequence sees nothing of its neighbours.
What it does not do: bias, caches for training, anything about devices.
"""

import json
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

import kernels

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 2048, "hidden_size": 320, "num_hidden_layers": 12,
    "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "partial_rotary_factor": 0.25, "rope_theta": 10000.0,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 256, "intermediate_size": 640,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "output_router_logits": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "initializer_range": 0.02, "use_cache": True, "rope_scaling": None,
}
SMALL = {"num_hidden_layers": 8, "shared_expert_intermediate_size": 128}   # what is trained first, then `grown`
CHUNK = 64


def rms0(x, weight, eps=1e-6):
    """RMS norm whose stored weight is an offset from one; computed in float32."""
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)).to(x.dtype)


def l2(x, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


@torch.library.custom_op("default_model::unit_inverse", mutates_args=())
def unit_inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 for strictly lower triangular A, (..., CHUNK, CHUNK)."""
    return kernels.unit_inverse(a)


@unit_inverse.register_fake
def _(a):
    return torch.empty(a.shape, device=a.device, dtype=a.dtype)


class Inverse(torch.autograd.Function):
    """`unit_inverse`, whose gradient needs two products only."""

    @staticmethod
    def forward(ctx, a):
        t = unit_inverse(a)
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        tt = t.transpose(-1, -2)
        return -(tt @ grad @ tt).tril(-1)


def gated_delta(q, k, v, g, beta, seg):
    """The gated delta rule over packed rows, chunk by chunk, float32.

    q, k: (B, H, T, Dk), normalised, q scaled; v: (B, H, T, Dv); g (log decay), beta: (B, H, T); seg: (B, T) sequence numbers.
    """
    b, h, t, dk = q.shape
    n = t // CHUNK
    q, k, v = (x.reshape(b, h, n, CHUNK, -1) for x in (q, k, v))
    g, beta = (x.reshape(b, h, n, CHUNK) for x in (g, beta))
    s = seg.reshape(b, 1, n, CHUNK)
    cum = g.cumsum(-1)
    same = (s[..., :, None] == s[..., None, :]) & torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp((cum[..., :, None] - cum[..., None, :]).masked_fill(~same, -1e30))
    a = ((beta[..., None] * k) @ k.transpose(-1, -2) * decay).tril(-1)
    inv = Inverse.apply(a)
    before = F.pad(s[..., -1], (1, 0), value=-1)[..., :-1, None]              # sequence at the end of the chunk before
    into = torch.exp(cum) * (s == before)                                     # decay from the carried state
    out_of = torch.exp(cum[..., -1:] - cum) * (s == s[..., -1:])              # decay to the end of the chunk
    u = inv @ (beta[..., None] * v)
    w = inv @ ((beta * into)[..., None] * k)
    scores = (q @ k.transpose(-1, -2)) * decay
    qi = q * into[..., None]
    ko = (k * out_of[..., None]).transpose(-1, -2)
    keep = into[..., -1, None, None]
    state = torch.zeros(b, h, dk, v.shape[-1], device=q.device, dtype=q.dtype)
    out = []
    for i in range(n):
        fresh = u[:, :, i] - w[:, :, i] @ state
        out.append(qi[:, :, i] @ state + scores[:, :, i] @ fresh)
        state = keep[:, :, i] * state + ko[:, :, i] @ fresh
    return torch.stack(out, 2).reshape(b, h, t, -1)


class DeltaNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hk, self.hv, self.dk, self.dv = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
        self.r = self.hv // self.hk
        h, key, value = c["hidden_size"], self.hk * self.dk, self.hv * self.dv
        self.in_proj_qkvz = nn.Linear(h, 2 * key + 2 * value, bias=False)
        self.in_proj_ba = nn.Linear(h, 2 * self.hv, bias=False)
        self.conv1d = nn.Conv1d(2 * key + value, 2 * key + value, c["linear_conv_kernel_dim"], groups=2 * key + value, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.hv).uniform_(1, 16).log())
        dt = torch.exp(torch.rand(self.hv) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(self.dv))
        self.out_proj = nn.Linear(value, h, bias=False)

    def project(self, x):
        """x (..., H) -> m (..., 2K+V) before the convolution, z (..., Hv, Dv), b, a (..., Hv)."""
        lead = x.shape[:-1]
        rows = self.in_proj_qkvz(x).reshape(*lead, self.hk, 2 * self.dk + 2 * self.r * self.dv)
        q, k, v, z = rows.split([self.dk, self.dk, self.r * self.dv, self.r * self.dv], -1)
        b, a = self.in_proj_ba(x).reshape(*lead, self.hk, 2 * self.r).split([self.r, self.r], -1)
        m = torch.cat([q.reshape(*lead, -1), k.reshape(*lead, -1), v.reshape(*lead, -1)], -1)
        return m, z.reshape(*lead, self.hv, self.dv), b.reshape(*lead, self.hv), a.reshape(*lead, self.hv)

    def gates(self, b, a):
        return torch.sigmoid(b.float()), -torch.exp(self.A_log.float()) * F.softplus(a.float() + self.dt_bias.float())

    def heads(self, c):
        """Convolved channels (..., 2K+V) -> q, k (..., Hv, Dk) normalised, v (..., Hv, Dv), float32."""
        lead, key = c.shape[:-1], self.hk * self.dk
        q, k, v = c.float().split([key, key, self.hv * self.dv], -1)
        q = l2(q.reshape(*lead, self.hk, self.dk)) * self.dk ** -0.5
        k = l2(k.reshape(*lead, self.hk, self.dk))
        return q.repeat_interleave(self.r, -2), k.repeat_interleave(self.r, -2), v.reshape(*lead, self.hv, self.dv)

    def finish(self, o, z):
        """Gated norm and output projection; o, z (..., Hv, Dv)."""
        o = o.float()
        u = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm.weight.float() * F.silu(z.float())
        return self.out_proj(u.flatten(-2).to(self.out_proj.weight.dtype))

    def forward(self, x, seg, cos, sin, mask):
        m, z, b, a = self.project(x)
        w = self.conv1d.weight[:, 0].to(m.dtype)
        c = w[:, -1] * m
        for back in range(1, w.shape[1]):
            same = F.pad(seg[:, back:] == seg[:, :-back], (back, 0))
            c = c + w[:, -1 - back] * F.pad(m[:, :-back], (0, 0, back, 0)) * same[..., None]
        q, k, v = (t.transpose(1, 2) for t in self.heads(F.silu(c)))
        beta, g = (t.transpose(1, 2) for t in self.gates(b, a))
        with torch.autocast(x.device.type, enabled=False):
            o = gated_delta(q, k, v, g, beta, seg)
        return self.finish(o.transpose(1, 2), z)

    def start(self, batch, device):
        return [torch.zeros(batch, self.conv1d.weight.shape[2] - 1, self.conv1d.weight.shape[0], device=device), torch.zeros(batch, self.hv, self.dk, self.dv, device=device)]

    def step(self, x, state, position, cos, sin):
        """One token: x (B, H); the recurrence as it is defined."""
        m, z, b, a = self.project(x)
        window = torch.cat([state[0], m[:, None]], 1)
        state[0] = window[:, 1:]
        q, k, v = self.heads(F.silu((window * self.conv1d.weight[:, 0].T).sum(1)))
        beta, g = self.gates(b, a)
        s = state[1] * torch.exp(g)[..., None, None]
        delta = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", s, k))
        state[1] = s + k[..., None] * delta[..., None, :]
        return self.finish(torch.einsum("bhkv,bhk->bhv", state[1], q), z)


def rotate(x, cos, sin):
    """Half-split rotary embedding on the first dimensions; cos, sin broadcast to (..., d/2)."""
    d = cos.shape[-1]
    a, b, rest = x[..., :d], x[..., d:2 * d], x[..., 2 * d:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.nh, self.nkv, self.d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        h = c["hidden_size"]
        self.q_proj = nn.Linear(h, 2 * self.nh * self.d, bias=False)
        self.k_proj = nn.Linear(h, self.nkv * self.d, bias=False)
        self.v_proj = nn.Linear(h, self.nkv * self.d, bias=False)
        self.o_proj = nn.Linear(self.nh * self.d, h, bias=False)
        self.q_norm, self.k_norm = Norm(self.d), Norm(self.d)

    def qkv(self, x, cos, sin):
        lead = x.shape[:-1]
        q, gate = self.q_proj(x).reshape(*lead, self.nh, 2 * self.d).chunk(2, -1)
        k = self.k_proj(x).reshape(*lead, self.nkv, self.d)
        v = self.v_proj(x).reshape(*lead, self.nkv, self.d)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v, gate

    def forward(self, x, seg, cos, sin, mask):
        q, k, v, gate = self.qkv(x, cos, sin)
        r = self.nh // self.nkv
        q, k, v = (t.transpose(1, 2).to(x.dtype) for t in (q, k.repeat_interleave(r, -2), v.repeat_interleave(r, -2)))
        o = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask).transpose(1, 2)
        return self.o_proj((o * torch.sigmoid(gate)).flatten(-2))

    def start(self, batch, device):
        return [None, None]

    def step(self, x, state, position, cos, sin):
        q, k, v, gate = self.qkv(x, cos, sin)
        state[0] = k[:, None] if state[0] is None else torch.cat([state[0], k[:, None]], 1)
        state[1] = v[:, None] if state[1] is None else torch.cat([state[1], v[:, None]], 1)
        r = self.nh // self.nkv
        keys, values = state[0].repeat_interleave(r, 2), state[1].repeat_interleave(r, 2)
        p = torch.softmax(torch.einsum("bhd,bthd->bht", q, keys) * self.d ** -0.5, -1)
        o = torch.einsum("bht,bthd->bhd", p, values)
        return self.o_proj((o * torch.sigmoid(gate)).flatten(-2))


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return rms0(x, self.weight.float())


class Experts(nn.Module):
    """All experts are computed and the unchosen weighted by zero: at this size that is the fastest way."""

    def __init__(self, c):
        super().__init__()
        self.e, self.k, h, i = c["num_experts"], c["num_experts_per_tok"], c["hidden_size"], c["moe_intermediate_size"]
        self.gate = nn.Linear(h, self.e, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(self.e, i, h))
        self.up_proj = nn.Parameter(torch.empty(self.e, i, h))
        self.down_proj = nn.Parameter(torch.empty(self.e, h, i))
        self.shared_expert = nn.Module()
        s = c["shared_expert_intermediate_size"]
        self.shared_expert.gate_proj, self.shared_expert.up_proj = nn.Linear(h, s, bias=False), nn.Linear(h, s, bias=False)
        self.shared_expert.down_proj = nn.Linear(s, h, bias=False)
        self.shared_expert_gate = nn.Linear(h, 1, bias=False)

    def forward(self, x):
        """x (..., H) -> (output, balance loss)."""
        e, i, h = self.gate_proj.shape
        with torch.autocast(x.device.type, enabled=False):
            p = torch.softmax(F.linear(x.float(), self.gate.weight.float()), -1)
        top, index = p.topk(self.k, -1)
        chosen = torch.zeros_like(p).scatter(-1, index, 1.0)
        weight = (p * chosen / top.sum(-1, keepdim=True)).to(x.dtype)
        a = F.silu(F.linear(x, self.gate_proj.reshape(e * i, h))) * F.linear(x, self.up_proj.reshape(e * i, h))
        a = (a.reshape(*a.shape[:-1], e, i) * weight[..., None]).flatten(-2)
        y = F.linear(a, self.down_proj.transpose(0, 1).reshape(h, e * i))
        s = self.shared_expert
        y = y + torch.sigmoid(self.shared_expert_gate(x)) * s.down_proj(F.silu(s.gate_proj(x)) * s.up_proj(x))
        balance = e * (chosen.reshape(-1, e).mean(0) / self.k * p.reshape(-1, e).mean(0)).sum()
        return y, balance


def thinned(y, keep):
    """Dropout: every element stays with the chance `keep` (a tensor), the rest are zero; all of them without one."""
    return y if keep is None else y * (torch.rand_like(y, dtype=torch.float32) < keep) / keep.to(y.dtype)


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        attention = (index + 1) % c["full_attention_interval"] == 0
        if attention:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.kind = "self_attn" if attention else "linear_attn"
        self.input_layernorm, self.post_attention_layernorm = Norm(c["hidden_size"]), Norm(c["hidden_size"])
        self.mlp = Experts(c)

    def forward(self, h, seg, cos, sin, mask, keep=None):
        h = h + thinned(getattr(self, self.kind)(self.input_layernorm(h), seg, cos, sin, mask), keep)
        y, balance = self.mlp(self.post_attention_layernorm(h))
        return h + thinned(y, keep), balance

    def step(self, h, state, position, cos, sin):
        h = h + getattr(self, self.kind).step(self.input_layernorm(h), state, position, cos, sin)
        return h + self.mlp(self.post_attention_layernorm(h))[0]


class Model(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.config = c = dict(CONFIG, **(config or {}))
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"])
        std = c["initializer_range"]
        for name, p in self.named_parameters():
            if p.dim() >= 2 and "conv1d" not in name:
                nn.init.normal_(p, std=std if "embed" in name else p.shape[-1] ** -0.5 * (0.35 if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")) else 1.0))
        rotary = int(c["head_dim"] * c["partial_rotary_factor"])
        self.register_buffer("inverse_frequency", c["rope_theta"] ** (-torch.arange(0, rotary, 2).float() / rotary), persistent=False)

    def rope(self, position):
        """cos, sin (..., 1, d/2) for positions (...)."""
        angle = position[..., None, None].float() * self.inverse_frequency
        return angle.cos(), angle.sin()

    def hidden(self, ids, seg, position, keep=None):
        """ids, seg, position (B, T), T a multiple of CHUNK -> final hidden state (B, T, H), mean balance loss."""
        cos, sin = self.rope(position)
        t = ids.shape[1]
        mask = ((seg[:, :, None] == seg[:, None, :]) & torch.ones(t, t, dtype=torch.bool, device=ids.device).tril())[:, None]
        h = self.embed_tokens(ids)
        total = 0.0
        for layer in self.layers:
            h, balance = layer(h, seg, cos, sin, mask, keep)
            total = total + balance
        return self.norm(h), total / len(self.layers)

    def forward(self, ids, seg, position):
        h, balance = self.hidden(ids, seg, position)
        return F.linear(h, self.embed_tokens.weight), balance


class Decoder:
    """Token by token: `step(tokens (B,))` returns logits (B, V)."""

    def __init__(self, model, batch):
        self.m, self.position = model, 0
        device = model.embed_tokens.weight.device
        self.state = [getattr(l, l.kind).start(batch, device) for l in model.layers]

    @torch.no_grad()
    def step(self, tokens):
        cos, sin = self.m.rope(torch.full((1,), self.position, device=tokens.device))
        h = self.m.embed_tokens(tokens)
        for layer, state in zip(self.m.layers, self.state):
            h = layer.step(h, state, self.position, cos, sin)
        self.position += 1
        return F.linear(self.m.norm(h), self.m.embed_tokens.weight)


def directed(logits, labels, back):
    """The mean loss over the labels of either direction, (2): those where `back` is 0, and those where it is 1; 0 where there are none.

    logits (B, T, V); labels, back (B, T); labels below zero are not counted.
    """
    wanted = labels >= 0
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
    return torch.stack([(loss * here).sum() / here.sum().clamp(min=1) for here in (wanted & (back == 0), wanted & (back == 1))])


@torch.no_grad()
def grown(small):
    """A model of CONFIG's size that computes what `small`, a model with SMALL, does.

    Four layers come into the middle, copies of the last four whose output projections are zero; the new half of every
    shared expert has random rows in and zero columns out.
    """
    net, half = Model({"vocab_size": small.config["vocab_size"]}), len(small.layers) // 2
    net.embed_tokens.load_state_dict(small.embed_tokens.state_dict())
    net.norm.load_state_dict(small.norm.state_dict())
    extra = len(net.layers) - len(small.layers)
    for i, layer in enumerate(net.layers):
        new = half <= i < half + extra
        state = small.layers[i if i < half + extra else i - extra].state_dict()
        for name, w in layer.named_parameters():
            old = state[name]
            if old.shape != w.shape:      # a shared expert
                if name.endswith("down_proj.weight"):
                    w.zero_()
                w[:old.shape[0], :old.shape[1]] = old
            else:
                w.copy_(old)
            if new and name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")):
                w.zero_()
    return net


def quantised(w, bits, group=64):
    """What an affine group quantiser (MLX's: edge of larger magnitude exact, scale and bias rounded to bf16) makes of w."""
    top = 2 ** bits - 1
    x = w.detach().float().reshape(*w.shape[:-1], -1, group)
    hi, lo = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    scale = ((hi - lo) / top).clamp(min=1e-7)
    side = lo.abs() > hi.abs()
    scale = torch.where(side, scale, -scale)
    edge = torch.where(side, lo, hi)
    q0 = torch.round(edge / scale)
    scale = torch.where(q0 != 0, edge / q0, scale)
    bias = torch.where(q0 != 0, edge, torch.zeros_like(edge))
    q = torch.round((x - bias) / scale).clamp(0, top)
    scale, bias = scale.bfloat16().float(), bias.bfloat16().float()
    return (q * scale + bias).reshape(w.shape).to(w.dtype)


def is_quantised(name, w):
    """Linears, experts and the embedding; rows whose length is no multiple of 64 stay dense."""
    return w.dim() >= 2 and "conv1d" not in name and w.shape[-1] % 64 == 0


@torch.no_grad()
def quantise_(model, bits):
    """Quantise and dequantise in place; router and shared-expert gate keep 8 bits, as MLX does."""
    for name, w in model.named_parameters():
        if is_quantised(name, w):
            router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
            w.copy_(quantised(w, max(bits, 8) if router else bits))
    return model


def hf_tensors(model):
    """Name -> tensor in the Hugging Face layout: prefix, experts one by one."""
    out = {}
    for name, w in model.state_dict().items():
        base = "model." + name
        stem, _, last = base.rpartition(".")
        if last in ("gate_proj", "up_proj", "down_proj") and stem.endswith(".mlp"):
            for e in range(w.shape[0]):
                out[f"{stem}.experts.{e}.{last}.weight"] = w[e].contiguous()
        else:
            out[base] = w.contiguous()
    return out


def load_hf(model, tensors):
    """The inverse of `hf_tensors`."""
    state = {}
    for name, w in model.state_dict().items():
        base = "model." + name
        stem, _, last = base.rpartition(".")
        if last in ("gate_proj", "up_proj", "down_proj") and stem.endswith(".mlp"):
            state[name] = torch.stack([tensors[f"{stem}.experts.{e}.{last}.weight"] for e in range(w.shape[0])])
        else:
            state[name] = tensors[base]
    model.load_state_dict({k: v.float() for k, v in state.items()})
    return model


def save_checkpoint(model, folder, eos, pad, dtype=torch.bfloat16):
    """Write config.json, generation_config.json and model.safetensors (in `dtype`)."""
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    config = dict(model.config, eos_token_id=eos, bos_token_id=None, pad_token_id=pad, torch_dtype=str(dtype).removeprefix("torch."),
                  layer_types=["full_attention" if l.kind == "self_attn" else "linear_attention" for l in model.layers])
    # "loaf" is read by bake: what answers are, and the mean log-probability below which one is a guess (README, "Unsure").
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": pad, "max_new_tokens": 160,
                  "loaf": {"answers": "shell_command", "unsure_below": -0.004}}
    tensors = {k: v.detach().to("cpu", torch.float32 if k.endswith("A_log") else dtype) for k, v in hf_tensors(model).items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        with open(os.path.join(folder, name), "w") as f:
            json.dump(value, f, indent=2)
            f.write("\n")


def load_checkpoint(folder):
    from safetensors.torch import load_file
    with open(os.path.join(folder, "config.json")) as f:
        saved = json.load(f)
    model = Model({k: saved[k] for k in CONFIG if k in saved})
    return load_hf(model, load_file(os.path.join(folder, "model.safetensors"))).eval()
