// Attributes and operands of every op in record order, by name: the op table, with which a test compares it. Of a weight
// the first of its planes is named; the others follow it.

namespace embed_op {
struct A { enum { rows, vocab, dim, format }; };
struct O { enum { ids, table, out = 5 }; };
}
namespace rms_norm_op {
struct A { enum { rows, heads, dim, eps, offset }; };
struct O { enum { x, weight, out }; };
}
namespace add_rms_norm_op {
struct A { enum { rows, heads, dim, eps, offset }; };
struct O { enum { a, b, weight, sum, out }; };
}
namespace add_op {
struct A { enum { rows, heads, dim }; };
struct O { enum { a, b, out }; };
}
namespace mul_op {
struct A { enum { rows, heads, dim }; };
struct O { enum { a, b, out }; };
}
namespace silu_op {
struct A { enum { rows, heads, dim }; };
struct O { enum { x, out }; };
}
namespace sigmoid_op {
struct A { enum { rows, heads, dim }; };
struct O { enum { x, out }; };
}
namespace silu_mul_op {
struct A { enum { rows, heads, dim }; };
struct O { enum { a, b, out }; };
}
namespace sigmoid_mul_op {
struct A { enum { rows, heads, dim }; };
struct O { enum { a, b, out }; };
}
namespace mul_rows_op {
struct A { enum { rows, dim }; };
struct O { enum { x, s, out }; };
}
namespace quantize_op {
struct A { enum { rows, heads, dim, group }; };
struct O { enum { x, codes, scales, sums }; };
}
namespace linear_dense_op {
struct A { enum { rows, inputs, outputs, format }; };
struct O { enum { x, weight, out = 5 }; };
}
namespace linear_quant_op {
struct A { enum { rows, inputs, outputs, format }; };
struct O { enum { codes, xscales, xsums, weight, out = 7 }; };
}
namespace expert_sort_op {
struct A { enum { rows, k, experts }; };
struct O { enum { ids, order, starts }; };
}
namespace expert_linear_dense_op {
struct A { enum { rows, k, experts, inputs, outputs, format, x_slots }; };
struct O { enum { x, order, starts, weight, out = 7 }; };
}
namespace expert_linear_quant_op {
struct A { enum { rows, k, experts, inputs, outputs, format, x_slots }; };
struct O { enum { codes, xscales, xsums, order, starts, weight, out = 9 }; };
}
namespace weighted_sum_op {
struct A { enum { rows, k, dim }; };
struct O { enum { y, w, out }; };
}
namespace softmax_op {
struct A { enum { rows, dim }; };
struct O { enum { x, out }; };
}
namespace top_k_op {
struct A { enum { rows, experts, k, renorm }; };
struct O { enum { probs, ids, weights }; };
}
namespace rope_table_op {
struct A { enum { rows, half }; };
struct O { enum { inv_freq, out }; };
}
namespace rope_op {
struct A { enum { rows, heads, dim, half }; };
struct O { enum { x, table, out }; };
}
namespace kv_write_op {
struct A { enum { rows, heads, dim, context }; };
struct O { enum { x, cache }; };
}
namespace attention_op {
struct A { enum { rows, heads, kv_heads, dim, value_dim, context, scale, window, soft_cap, sinks }; };
struct O { enum { q, k, v, out }; };
}
namespace conv_op {
struct A { enum { rows, heads, dim, kernel }; };
struct O { enum { x, weight, state, out }; };
}
namespace conv_silu_op {
struct A { enum { rows, heads, dim, kernel }; };
struct O { enum { x, weight, state, out }; };
}
namespace l2_norm_op {
struct A { enum { rows, heads, dim, eps, scale }; };
struct O { enum { x, out }; };
}
namespace gdn_gates_op {
struct A { enum { rows, heads, dim }; };
struct O { enum { a, b, a_log, dt_bias, decay, beta }; };
}
namespace gdn_scan_op {
struct A { enum { rows, k_heads, v_heads, k_dim, v_dim, tiled }; };
struct O { enum { q, k, v, decay, beta, state, out }; };
}
namespace gather_rows_op {
struct A { enum { rows, of, dim }; };
struct O { enum { x, select, out }; };
}
