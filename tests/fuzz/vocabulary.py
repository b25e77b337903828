"""What random models are made of: expressions in ``x`` and, where they have modules, ``{0}``.

``{c}`` in a module stands for the channels of ``x``. An expression that fails or does not stay
finite on the shape at hand is not taken, so none needs conditions of its own.
"""

from __future__ import annotations

POINTWISE = [
    "F.gelu(x)",
    "F.gelu(x, approximate='tanh')",
    "F.relu(x)",
    "F.silu(x)",
    "torch.tanh(x)",
    "torch.sigmoid(x)",
    "F.leaky_relu(x, 0.1)",
    "F.hardswish(x)",
    "F.mish(x)",
    "F.softplus(x)",
    "F.elu(x)",
    "F.selu(x)",
    "F.relu(x).square()",
    "F.relu6(x)",
    "x.clamp(-1, 1)",
    "F.softsign(x)",
    "x * (x * 0.5 + 1)",
    "(x * 1.0).mul_(2).relu_()",
    "torch.where(x > 0, x, x * x)",
    "x.float().to(x.dtype) * 2",
    "x.bfloat16().to(x.dtype)",
    "x * torch.sigmoid(1.702 * x)",
    "F.dropout(F.relu(x), 0.2)",
    "torch.erf(x)",
    "torch.exp(-x.square())",
    "x / (1 + x.abs())",
    "F.hardtanh(x)",
    "F.hardsigmoid(x)",
    "F.tanhshrink(x)",
    "F.logsigmoid(x)",
    "torch.sign(x) + x",
]

STEEP = [
    "torch.sin(30 * x)",
    "torch.sin(3 * x) + torch.cos(x)",
    "x + torch.sin(8 * x).square() / 8",
    "torch.sigmoid(40 * x)",
    "torch.tanh(20 * x)",
    "torch.exp(3 * x.clamp(max=2))",
    "torch.remainder(x, 1.0)",
    "torch.atan2(torch.sin(9 * x), torch.cos(9 * x))",
    "1 / (x.square() + 1e-3)",
    "1 / (F.relu(x) + 1e-2)",
    "1 / (x.abs() + 1e-2)",
    "(x.abs() + 1e-4).pow(0.5)",
    "(x.square() + 1e-6).sqrt()",
    "torch.hypot(x, x + 0.01)",
    "torch.log(x.abs() + 1e-3)",
    "torch.rsqrt(x.square() + 1e-3)",
    "x.pow(3) / 4",
    "torch.sign(x) * x.abs().pow(0.3)",
    "x.sign() * torch.log1p(x.abs() * 100)",
]

DIFFERENCES = [
    "x - x.detach() * 0.99",
    "x - x.mean(-1, keepdim=True)",
    "(x - x.mean(0, keepdim=True)).square()",
    "x - x.bfloat16().to(x.dtype) + x",
    "torch.diff(x, dim=-1, append=x[..., :1]).square()",
    "x - torch.tanh(x)",
    "F.softplus(x) - F.relu(x)",
    "(x - x.roll(1, -1)).abs()",
]

EXTREMES = [
    "x / x.max()",
    "x / x.abs().amax(-1, keepdim=True)",
    "F.normalize(x, p=float('inf'), dim=-1)",
    "(x - x.amin()) / (x.amax() - x.amin())",
    "x * (x == x.amax(-1, keepdim=True))",
    "x - x.amax(-1, keepdim=True)",
    "F.normalize(x, dim=-1) * 4",
    "x.sort(-1).values",
    "x.cummax(-1).values",
    "torch.maximum(x, x.mean(-1, keepdim=True))",
    "x * x.argsort(-1).to(x.dtype)",
    "x + x.norm(p=float('inf'), dim=-1, keepdim=True)",
    "x.topk(x.shape[-1] // 2, -1).values",
    "F.one_hot(x.float().round().long() % 5, 5).to(x.dtype).mean(-2).mean() * x",
    "x * torch.bucketize(x.detach(), torch.linspace(-2, 2, 9, dtype=x.dtype)).to(x.dtype)",
]

ROWS = [
    "torch.cat([x[..., 1:], x[..., :1]], -1)",
    "torch.cat(x.chunk(2, -1)[::-1], -1)",
    "x.flip(-1)",
    "F.softmax(x, -1) * 4",
    "F.log_softmax(x, -1)",
    "F.glu(x)",
    "F.rms_norm(x, x.shape[-1:])",
    "F.layer_norm(x, x.shape[-1:])",
    "(lambda a, b: F.silu(a) * b)(*x.chunk(2, -1))",
    "(lambda a, b: F.gelu(a) * b)(*x.chunk(2, -1))",
    "(lambda a, b: F.relu(a) * b)(*x.chunk(2, -1))",
    "(lambda a, b: torch.cat([a * b.sigmoid(), b * a.sigmoid()], -1))(*x.chunk(2, -1))",
    "x.cumsum(-1) * 0.1",
    "x * torch.logsumexp(x, -1, keepdim=True)",
    "x + x.std(-1, keepdim=True)",
    "F.max_pool1d(x, 2)",
    "(lambda g: (g - g.amax(-1, True)).flatten(-2))(x.unflatten(-1, (-1, 4)))",
]

TOKENS = [
    "F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]",
    "F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]",
    "(x @ x.transpose(1, 2) * 0.1).softmax(-1) @ x",
    "(x @ x.transpose(1, 2)).softmax(-1) @ x",
    "(x @ x.transpose(1, 2)).masked_fill("
    "torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool(), "
    "float('-inf')).softmax(-1) @ x",
    "x.cumsum(1) * 0.2",
    "x + x.roll(1, 1)",
    "x - x.mean(1, keepdim=True)",
    "F.pad(x, (0, 0, 1, 1))[:, 1:-1]",
    "x.transpose(1, 2).reshape(x.shape)",
    "x[:, ::2]",
    "torch.stack(x.unbind(1)[::-1], 1)",
    "x.transpose(0, 1).contiguous().transpose(0, 1)",
    "x.amax(1)",
    "x.mean(1)",
    "x + x.amax(1, keepdim=True)",
    "x.logsumexp(1)",
    "x[:, 0]",
    "(lambda a, b, p: torch.cat([a * p.cos() - b * p.sin(), a * p.sin() + b * p.cos()], -1))"
    "(*x.chunk(2, -1), torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None])",
    "(lambda a, b: torch.cat([a * b.cos() - b * a.sin(), a * b.sin() + b * a.cos()], -1))"
    "(*(4 * x).chunk(2, -1))",
]

IMAGES = [
    "F.max_pool2d(x, 2)",
    "F.max_pool2d(x, 3, 1, 1)",
    "F.avg_pool2d(x, 3, 1, 1)",
    "F.avg_pool2d(x, 2)",
    "F.interpolate(x, scale_factor=2)",
    "F.interpolate(x, scale_factor=2, mode='bilinear')",
    "x * torch.sigmoid(x.mean((2, 3), keepdim=True))",
    "F.lp_pool2d(x, 2, 2)",
    "x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)",
    "F.pixel_shuffle(x, 2)",
    "F.pixel_unshuffle(x, 2)",
    "F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2)",
    "F.instance_norm(x)",
    "F.group_norm(x, 1)",
    "F.normalize(x, dim=1) * 3",
    "x.flip(3)",
    "F.local_response_norm(x, 3)",
    "x.transpose(2, 3)",
    "F.adaptive_avg_pool2d(x, 3)",
    "F.adaptive_max_pool2d(x, 2)",
    "F.pad(x, (1, 1, 1, 1), mode='reflect')",
    "x.amax((2, 3), keepdim=True) + x",
]

LAYERS = [  # (modules, expression)
    (["nn.Linear({c}, 16)"], "{0}(x)"),
    (["nn.Linear({c}, 33)"], "{0}(x)"),
    (["nn.Linear({c}, 64)"], "{0}(x)"),
    (["nn.Linear({c}, 128)"], "{0}(x)"),
    (["nn.Linear({c}, 100, bias=False)"], "{0}(x)"),
    (["nn.Linear({c}, 64)"], "F.gelu({0}(x))"),
    (["nn.Linear({c}, {c})"], "x + F.gelu({0}(x))"),
    (["nn.Linear({c}, {c})"], "{0}(F.silu({0}(x)))"),
    (["nn.Linear({c}, 64)", "nn.Linear(64, {c})"], "x + {1}(F.gelu({0}(x)))"),
    (
        ["nn.Linear({c}, 48)", "nn.Linear({c}, 48)", "nn.Linear(48, {c})"],
        "x + {2}(F.silu({0}(x)) * {1}(x))",
    ),
    (
        ["nn.LayerNorm({c})", "nn.Linear({c}, 64)", "nn.Linear(64, {c})"],
        "x + {2}(F.gelu({1}({0}(x))))",
    ),
    (
        ["nn.RMSNorm({c})", "nn.Linear({c}, 128)", "nn.Linear(64, {c})"],
        "x + {2}(F.glu({1}({0}(x))))",
    ),
    (["nn.Linear({c}, {c})", "nn.Linear({c}, {c})"], "{0}(x) * torch.sigmoid({1}(x))"),
    (["nn.Linear({c}, {c})"], "F.linear(F.gelu({0}(x)), {0}.weight.t())"),
]

NORMS = [
    (["nn.LayerNorm({c})"], "{0}(x)"),
    (["nn.RMSNorm({c})"], "{0}(x)"),
    (["nn.LayerNorm({c})"], "x + {0}(x)"),
]

MATRIX = [(["nn.BatchNorm1d({c})"], "{0}(x)"), (["nn.BatchNorm1d({c})"], "F.relu({0}(x))")]

ATTENTION = [
    (
        ["nn.Linear({c}, 96)", "nn.Linear(32, {c})"],
        "x + {1}((lambda q, k, v: F.scaled_dot_product_attention(q, k, v))"
        "(*{0}(x)[:, None].chunk(3, -1))[:, 0])",
    ),
    (
        ["nn.Linear({c}, 96)", "nn.Linear(32, {c})"],
        "x + {1}((lambda q, k, v: (q @ k.transpose(1, 2) * 32**-0.5).softmax(-1) @ v)"
        "(*{0}(x).chunk(3, -1)))",
    ),
    (
        ["nn.Linear({c}, 192)", "nn.Linear(64, {c})"],
        "x + {1}((lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(*("
        "t.unflatten(-1, (4, 16)).transpose(1, 2) for t in {0}(x).chunk(3, -1)"
        ")).transpose(1, 2).flatten(2))",
    ),
    (
        ["nn.MultiheadAttention({c}, 1, batch_first=True)"],
        "x + {0}(x, x, x, need_weights=False)[0]",
    ),
    (
        ["nn.LayerNorm({c})", "nn.Linear({c}, 96)", "nn.Linear(32, {c})"],
        "x + {2}((lambda q, k, v: F.scaled_dot_product_attention(8 * q, 8 * k, v))"
        "(*{1}({0}(x))[:, None].chunk(3, -1))[:, 0])",
    ),
    (
        ["nn.Linear({c}, 96)", "nn.Linear(32, {c})"],
        "x + {1}((lambda q, k, v: (6 * q @ k.transpose(1, 2)).softmax(-1) @ v)"
        "(*{0}(x).chunk(3, -1)))",
    ),
    (  # heads that share keys
        ["nn.Linear({c}, 128)", "nn.Linear(64, {c})"],
        "x + {1}((lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1),"
        " v.repeat_interleave(2, 1), is_causal=True))(*(t.unflatten(-1, (-1, 16)).transpose(1, 2)"
        " for t in {0}(x).split((64, 32, 32), -1))).transpose(1, 2).flatten(2))",
    ),
    (
        ["nn.Linear({c}, 96)", "nn.RMSNorm(16)", "nn.Linear(64, {c})"],
        "x + {2}((lambda q, k, v: F.scaled_dot_product_attention({1}(q), *("
        "t[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2) for t in ({1}(k), v))))"
        "(*(t.unflatten(-1, (-1, 16)).transpose(1, 2)"
        " for t in {0}(x).split((64, 16, 16), -1))).transpose(1, 2).flatten(2))",
    ),
    (  # sparse gradients: an autoencoder's top units, a router's two experts
        ["nn.Linear({c}, 96)", "nn.Linear(96, {c})"],
        "{1}((lambda h: h * (h >= h.topk(4, -1).values[..., -1:]))({0}(x)))",
    ),
    (
        ["nn.Linear({c}, 4)", "nn.Linear({c}, 4 * 32)", "nn.Linear(32, {c})"],
        "x + {2}((lambda g, h: (g.where(g >= g.topk(2, -1).values[..., -1:], 0)[..., None]"
        " * h.unflatten(-1, (4, 32))).sum(-2))({0}(x).softmax(-1), F.gelu({1}(x))))",
    ),
]

CONVOLUTIONS = [
    ([f"nn.Conv2d({{c}}, {out}, {k}, stride={s}, padding={p}, bias={b})"], "{0}(x)")
    for out, k, s, p, b in [
        (8, 3, 1, 1, True),
        (16, 3, 1, 1, False),
        (17, 5, 1, 2, True),
        (32, 1, 1, 0, False),
        (16, 1, 2, 0, True),
        (16, 3, 2, 1, False),
        (8, 2, 2, 0, True),
        (32, 4, 4, 0, True),
    ]
] + [
    (["nn.Conv2d({c}, {c}, 3, padding=1)"], "x + F.relu({0}(x))"),
    (["nn.Conv2d({c}, {c}, 3, padding=1, groups={c})"], "{0}(x)"),
    (["nn.Conv2d({c}, 16, 3, padding=2, dilation=2)", "nn.BatchNorm2d(16)"], "F.relu({1}({0}(x)))"),
    (["nn.Conv2d({c}, 16, 3, padding=1, padding_mode='circular')"], "F.silu({0}(x))"),
    (["nn.ConvTranspose2d({c}, 8, 2, stride=2)"], "{0}(x)"),
    (["nn.BatchNorm2d({c})"], "F.relu({0}(x))"),
    (["nn.BatchNorm2d({c})"], "{0}(x)"),
    (["nn.GroupNorm(1, {c})"], "{0}(x)"),
    (["nn.PReLU({c})"], "{0}(x)"),
]

LOSSES = [  # in y, the output, and in target, near it
    "(y.float() * target).mean()",
    "y.float().square().mean()",
    "F.mse_loss(y, target)",
    "F.l1_loss(y, target)",
    "F.smooth_l1_loss(torch.tanh(y), torch.tanh(target))",
    "F.mse_loss(torch.sigmoid(y), torch.sigmoid(target))",
    "F.huber_loss(y * 0.5 + 0.1, target * 0.5 + 0.1)",
    "F.cross_entropy(y.flatten(1), target.flatten(1).argmax(-1))",
    "F.cross_entropy(8 * y.flatten(0, -2), target.flatten(0, -2).argmax(-1))",
    "F.binary_cross_entropy_with_logits(y, (target > 0).to(y.dtype))",
    "y.float().logsumexp(-1).mean()",
    "y.flatten(1).amax(1).square().mean()",
    "y.norm(p=float('inf'))",
    "y.float().norm()",
    "F.kl_div(y.log_softmax(-1), target.softmax(-1), reduction='batchmean')",
    "(1 - F.cosine_similarity(y, target, -1)).mean()",
    "F.gaussian_nll_loss(y, target, y.square() + 0.1)",
    "(lambda e: F.cross_entropy(10 * e @ e.T, torch.arange(len(y), device=y.device)))"
    "(F.normalize(y.flatten(1)))",
    "((y - target).square() + 1e-6).sqrt().mean()",
    "(y.amax(-1) - y.amin(-1)).mean()",
    "y.topk(2, -1).values.square().mean()",
    "(lambda e: F.softplus((10 * e @ e.T - 5)"
    " * (1 - 2 * torch.eye(len(y), device=y.device))).mean())"
    "(F.normalize(y.flatten(1)))",
]
