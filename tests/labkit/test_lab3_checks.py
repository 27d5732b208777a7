"""What the checks of lab 3 say to answers that no mutant can be: right ones in another style, and a few wrong ones."""

import torch
import torch.nn.functional as F

import labkit
from labkit.quantlab import given

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def accepted(question: str, answer) -> None:
    result = labkit.check(question, answer)
    assert all(row.passed for row in result.rows), f"a right answer is refused:\n{result}"


def test_attention_by_the_library_is_welcome_where_its_error_is_asked_for():
    def propagated_error(x, exact, rounded, head_dim):
        def run(weights):
            k, v = x @ weights["k"].T, x @ weights["v"].T
            heads = ((x @ weights["q"].T), k, v)
            q, keys, values = (t.unflatten(1, (-1, head_dim)).transpose(0, 1)[None] for t in heads)
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            return {"k": k, "v": v, "attention": out}

        a, b = run(exact), run(rounded)
        return {name: (b[name] - a[name]).norm() / a[name].norm() for name in a}

    accepted("propagated_error", propagated_error)


def test_gptq_may_eliminate_columns_from_the_inverse_instead_of_factoring_it():
    def gptq(weight, hessian, bits, group_size, damping=0.01):
        _, scales, zeros = given.quantize_weight(weight, bits, group_size)
        size, n = weight.shape[1] // scales.shape[1], weight.shape[1]
        damped = hessian.double() + damping * hessian.diagonal().mean() * torch.eye(n)
        inverse, rest, codes = torch.linalg.inv(damped), weight.double(), torch.zeros(weight.shape, dtype=torch.uint8)
        for k in range(n):
            scale, zero = scales[:, k // size].double(), zeros[:, k // size].double()
            code = (rest[:, k] / scale + zero).round().clamp(0, 2**bits - 1)
            codes[:, k] = code.byte()
            rest = rest - torch.outer((rest[:, k] - (code - zero) * scale) / inverse[k, k], inverse[k])
            inverse = inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
        return codes, scales, zeros

    accepted("gptq", gptq)


def test_words_may_be_made_of_whole_numbers_of_python():
    def pack_awq(codes):
        if codes.shape[1] % 8:
            raise ValueError("columns: a multiple of 8")
        if (codes > 15).any():
            raise ValueError("codes: at most 15")
        words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int32)
        for r, row in enumerate(codes.tolist()):
            for w in range(words.shape[1]):
                word = sum(row[8 * w + column] << 4 * i for i, column in enumerate(ORDER))
                words[r, w] = word - 2**32 if word >= 2**31 else word
        return words

    accepted("pack_awq", pack_awq)


def test_clips_may_be_searched_group_by_group():
    def search_clip(weight, bits, group_size, importance=None):
        size = weight.shape[1] if group_size == -1 else group_size
        counts = torch.ones(weight.shape[1]) if importance is None else importance
        best = torch.ones(len(weight), weight.shape[1] // size)
        for r in range(best.shape[0]):
            for g in range(best.shape[1]):
                part, least = slice(g * size, (g + 1) * size), None
                group = weight[r, part]
                for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5):
                    limit = share * float(group.abs().max())
                    codes, scale, zero = given.affine_quantize(group.clamp(-limit, limit), bits)
                    lost = (counts[part] * ((codes.float() - zero.float()) * scale - group) ** 2).sum().item()
                    if least is None or lost < least:
                        least, best[r, g] = lost, share
        return best

    accepted("search_clip", search_clip)


def test_a_controller_that_answers_twice_for_a_step_is_told_so():
    def bits_by_norm(norms, high, low):
        return [4] * (2 * len(norms))

    assert "200 norms give 400 entries: one for each norm was expected" in str(
        labkit.check("bits_by_norm", bits_by_norm)
    )


def test_what_must_be_refused_and_is_not_is_said_without_the_numbers_of_a_tensor():
    def quantize_clamped(weight, bits, group_size, sigmas):
        groups = weight.reshape(len(given.quantize_weight(weight, bits, group_size)[1]), -1)
        return given.quantize_weight(groups.reshape(weight.shape), bits, group_size)

    assert "sigmas 0 must raise ValueError, but was accepted, and gave a tuple" in str(
        labkit.check("quantize_clamped", quantize_clamped)
    )
