// The CPU kernels of sparse training under the sanitizers: on every instruction set that
// runs here, with several threads and several callers, against a model of loops and sorting.
//
// Arrays have the exact length and are separate, so that the sanitizer sees an access outside.
// tests/unit/test_kernels.py and test_kernel_packets.py check the results for every dtype.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "codec/packet.h"
#include "cpu/half.h"
#include "cpu/isa.h"
#include "harness.h"
#include "instruction_sets.h"
#include "kernels/device_kernels.h"
#include "kernels/quantize.h"

namespace {

using namespace pycomm;
using namespace pycomm::kernels;

using Floats = std::vector<float>;
using Places = std::vector<int32_t>;

uint32_t key(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

// Few values, many of them alike, some zeros, and now and then one that is not finite.
Floats numbers(std::mt19937& random, size_t count, float size = 1, bool odd = true) {
  std::normal_distribution<float> normal(0, size);
  Floats all(count);
  for (float& x : all) {
    x = normal(random);
    if (random() % 8 == 0) x = std::round(x * 4) / 4;
    if (odd && random() % 2000 == 0) x = std::copysign(random() % 2 ? INFINITY : NAN, x);
  }
  return all;
}

bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The k largest magnitudes, ties to the lower index, ascending.
Places largest(const Floats& x, size_t k) {
  Places order(x.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int32_t a, int32_t b) {
    const uint32_t p = key(x[static_cast<size_t>(a)]), q = key(x[static_cast<size_t>(b)]);
    return p != q ? p > q : a < b;
  };
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(),
                   before);
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

float one_nan(float x) { return x == x ? x : std::bit_cast<float>(0x7fc00000u); }

// ---- steps --------------------------------------------------------------------------------------

struct How {
  Dtype grad = Dtype::float32;
  bool nesterov = false, decay = false, masking = true, together = false;
  bool misleading = false;  // see mislead()
};

// Makes fewer than k of 20,011 elements large, and only such as a sample sees
// (kernels/cpu/sample.h): its lower bound is always too high.
void mislead(Floats& x) {
  for (size_t i = 0; i < std::min<size_t>(x.size(), 128); ++i)
    if (i % 64 < 16) x[i] = 1e6f;
}

// Tensors with their model beside them.
class Steps {
 public:
  Steps(std::mt19937& random, std::vector<size_t> counts, const How& how)
      : random_(random), how_(how), counts_(std::move(counts)) {
    for (const size_t count : counts_) {
      u_.push_back(numbers(random, count, 1, false));
      v_.push_back(numbers(random, count, 1, false));
      weight_.push_back(numbers(random, count, 1, false));
      halves_.emplace_back(count);
      grad_.emplace_back(count);
    }
    u_model_ = u_;
    v_model_ = v_;
    const size_t total = std::accumulate(counts_.begin(), counts_.end(), size_t{0});
    for (const size_t count : how.together ? std::vector{total} : counts_) {
      const size_t k = std::min(count, count / 500 + 1);
      outputs_.push_back({Places(k), Floats(k), Floats(k)});
    }
    describe();
    workspace_.resize(cpu_kernels().dgc_workspace_bytes(tables()));
  }

  void run(float size, const std::string& where) {
    for (size_t t = 0; t < counts_.size(); ++t) new_gradient(t, size);
    const DgcStep step{.tables = tables(),
                       .grad_dtype = how_.grad,
                       .weight_dtype = Dtype::float32,
                       .momentum = 0.9,
                       .weight_decay = how_.decay ? 0.01 : 0,
                       .scale = 0.5,
                       .scales = nullptr,
                       .nesterov = how_.nesterov,
                       .masking = how_.masking,
                       .found_inf = nullptr,
                       .workspace = {workspace_.data(), workspace_.size()}};
    cpu_kernels().dgc_step(step, {});
    for (size_t s = 0, t = 0; s < outputs_.size(); t += selections_[s++].pieces) {
      Floats v, u;
      for (size_t i = t; i < t + selections_[s].pieces; ++i) {
        v.insert(v.end(), v_model_[i].begin(), v_model_[i].end());
        u.insert(u.end(), u_model_[i].begin(), u_model_[i].end());
      }
      compare(s, t, u, v, where);
    }
  }

 private:
  struct Output {
    Places indices;
    Floats values, u_values;
  };

  DgcTables tables() const { return {pieces_, selections_, Dtype::float32}; }

  void describe() {
    for (size_t t = 0; t < counts_.size(); ++t) {
      const void* const grad =
          how_.grad == Dtype::float32 ? static_cast<void*>(grad_[t].data()) : halves_[t].data();
      pieces_.push_back(
          {grad, how_.decay ? weight_[t].data() : nullptr, u_[t].data(), v_[t].data(), counts_[t]});
    }
    for (Output& o : outputs_)
      selections_.push_back({how_.together ? counts_.size() : 1, o.indices.size(), 5,
                             o.indices.data(), o.values.data(), o.u_values.data()});
  }

  void new_gradient(size_t t, float size) {
    Floats fresh = numbers(random_, counts_[t], size, !how_.misleading);
    if (how_.misleading) mislead(fresh);
    for (size_t i = 0; i < counts_[t]; ++i) {
      float g = fresh[i];
      if (how_.grad == Dtype::float16) {
        halves_[t][i] = cpu::narrow_float16(g);
        g = cpu::widen_float16(halves_[t][i]);
      } else if (how_.grad == Dtype::bfloat16) {
        halves_[t][i] = cpu::narrow_bfloat16(g);
        g = cpu::widen_bfloat16(halves_[t][i]);
      }
      grad_[t][i] = g;
      float &u = u_model_[t][i], &v = v_model_[t][i];
      float x = 0.5f * g;
      if (how_.decay) x = std::fma(0.01f, weight_[t][i], x);
      const float next = how_.nesterov ? 0.9f * (u + x) : std::fma(0.9f, u, x);
      v = one_nan(v + (how_.nesterov ? next + x : next));
      u = one_nan(next);
    }
  }

  void compare(size_t s, size_t first, Floats& u, Floats& v, const std::string& where) {
    const Output& o = outputs_[s];
    Places wanted = largest(v, o.indices.size());
    Floats values, u_values;
    for (int32_t& at : wanted) {
      float &left = u[static_cast<size_t>(at)], &sent = v[static_cast<size_t>(at)];
      values.push_back(sent);
      u_values.push_back(left);
      if (how_.masking || !std::isfinite(sent)) left = 0;
      sent = 0;
      at += 5;
    }
    expect(o.indices == wanted, where + ": indices of selection " + std::to_string(s));
    expect(same(o.values, values), where + ": values");
    expect(same(o.u_values, u_values), where + ": u_values");
    size_t at = 0;
    for (size_t t = first; t < first + selections_[s].pieces; at += counts_[t++]) {
      const auto begin = static_cast<std::ptrdiff_t>(at);
      const auto end = begin + static_cast<std::ptrdiff_t>(counts_[t]);
      u_model_[t].assign(u.begin() + begin, u.begin() + end);
      v_model_[t].assign(v.begin() + begin, v.begin() + end);
      expect(same(u_[t], u_model_[t]), where + ": u of tensor " + std::to_string(t));
      expect(same(v_[t], v_model_[t]), where + ": v of tensor " + std::to_string(t));
    }
  }

  std::mt19937& random_;
  How how_;
  std::vector<size_t> counts_;
  std::vector<Floats> u_, v_, weight_, grad_, u_model_, v_model_;
  std::vector<std::vector<uint16_t>> halves_;
  std::vector<Output> outputs_;
  std::vector<DgcPiece> pieces_;
  std::vector<DgcSelection> selections_;
  std::vector<std::byte> workspace_;
};

const std::vector<size_t> kRagged{0, 1, 63, 64, 65, 4097, 20'011};

const Test kSteps("sparse: steps of ragged tensors, every dtype and option", [] {
  on_each_isa([](const std::string& where) {
    std::mt19937 random(1);
    const How ways[] = {{},
                        {.grad = Dtype::float16, .nesterov = true, .decay = true},
                        {.grad = Dtype::bfloat16, .masking = false},
                        {.decay = true, .together = true},
                        {.misleading = true},
                        {.nesterov = true, .masking = false, .together = true}};
    for (const How& how : ways) {
      Steps steps(random, kRagged, how);
      // Steady, a jump that the lower bound does not expect, and nothing new.
      for (const float size : {0.1f, 0.1f, 9.f, 0.f}) steps.run(size, where);
    }
  });
});

// More than one part, so that threads work on the same selection.
const Test kParts("sparse: a step of several threads", [] {
  on_each_isa([](const std::string& where) {
    std::mt19937 random(2);
    Steps steps(random, {700'001, 400'000}, {.together = true});
    for (const float size : {0.1f, 5.f}) steps.run(size, where);
  });
});

const Test kCallers("sparse: several callers at once", [] {
  const auto call = [](unsigned seed) {
    std::mt19937 random(seed);
    Steps steps(random, {9'000, 1'050'000}, {});
    for (int i = 0; i < 2; ++i) steps.run(0.1f, "caller");
  };
  std::thread other(call, 3);
  call(4);
  other.join();
});

// ---- selection ----------------------------------------------------------------------------------

void try_topk(const Floats& x, size_t k, const std::string& where) {
  Places indices(k);
  Floats values(k), threshold(1), wanted;
  std::vector<std::byte> room(cpu_kernels().topk_workspace_bytes(x.size(), k, Dtype::float32));
  Floats copy = x;
  cpu_kernels().topk({copy.data(), x.size(), Dtype::float32},
                     {.k = k,
                      .indices = indices.data(),
                      .values = values.data(),
                      .threshold = k == 0 ? nullptr : threshold.data(),
                      .workspace = {room.data(), room.size()}},
                     {});
  const std::string what =
      where + ": topk " + std::to_string(k) + " of " + std::to_string(x.size());
  expect(indices == largest(x, k), what);
  for (const int32_t at : indices) wanted.push_back(x[static_cast<size_t>(at)]);
  expect(same(values, wanted), what + ": values");
  if (k == 0) return;
  const float least = *std::min_element(wanted.begin(), wanted.end(),
                                        [](float a, float b) { return key(a) < key(b); });
  expect(key(least) == std::bit_cast<uint32_t>(threshold[0]), what + ": threshold");
}

const Test kTopk("sparse: topk, at the ends of k and with ties", [] {
  on_each_isa([](const std::string& where) {
    std::mt19937 random(5);
    for (const size_t count : {0, 1, 64, 65, 1023, 30'001})
      for (const size_t k : {size_t{0}, count / 1000, count / 3, count})
        try_topk(numbers(random, count), k, where);
    Floats sampled = numbers(random, 20'011, 1, false), rising(300'000);
    mislead(sampled);
    try_topk(sampled, 41, where);
    // Each replaces the least of the kept ones.
    for (size_t i = 0; i < rising.size(); ++i)
      rising[i] = std::bit_cast<float>(0x3f000000u + static_cast<uint32_t>(i));
    try_topk(rising, 100, where);
    try_topk(Floats(1'100'000, 0.5f), 700, where);
    try_topk(numbers(random, 1'100'000), 1100, where);
  });
});

// ---- packets ------------------------------------------------------------------------------------

struct Sent {
  Places indices;
  Floats values;
  codec::Packet packet() const { return {indices.data(), values.data(), indices.size()}; }
};

Sent some_of(std::mt19937& random, size_t count, unsigned one_of) {
  Sent sent;
  for (size_t i = 0; i < count; ++i)
    if (random() % one_of == 0) sent.indices.push_back(static_cast<int32_t>(i));
  sent.values = numbers(random, sent.indices.size(), 1, false);
  return sent;
}

const Test kDecode("sparse: decoding into several arrays, by several threads", [] {
  on_each_isa([](const std::string& where) {
    std::mt19937 random(6);
    const std::vector<size_t> counts{5, 0, 700'003, 1, 600'000};
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    const std::vector<Sent> sent{some_of(random, total, 1000), some_of(random, total, 7), {}};
    std::vector<codec::Packet> packets;
    for (const Sent& s : sent) packets.push_back(s.packet());
    Floats sums(total);
    std::vector<bool> there(total);
    for (const Sent& s : sent)
      for (size_t i = 0; i < s.indices.size(); ++i) {
        const auto at = static_cast<size_t>(s.indices[i]);
        sums[at] = there[at] ? sums[at] + s.values[i] : s.values[i];
        there[at] = true;
      }
    std::vector<Floats> outs, params, before;
    std::vector<Array> out_arrays, param_arrays;
    for (const size_t count : counts) {
      outs.push_back(Floats(count, 7));
      before.push_back(numbers(random, count, 1, false));
    }
    params = before;
    for (size_t a = 0; a < counts.size(); ++a) {
      out_arrays.push_back({outs[a].data(), counts[a]});
      param_arrays.push_back({params[a].data(), counts[a]});
    }
    cpu_kernels().decode_sum({out_arrays, Dtype::float32}, packets, Dtype::float32, 0.25, {});
    cpu_kernels().decode_update({param_arrays, Dtype::float32}, packets, Dtype::float32,
                                {.lr = 0.1, .scale = 0.25}, {});
    size_t at = 0;
    for (size_t a = 0; a < counts.size(); ++a)
      for (size_t i = 0; i < counts[a]; ++i, ++at) {
        const float mean = there[at] ? 0.25f * sums[at] : 0;
        const float wanted = there[at] ? std::fma(-0.1f, mean, before[a][i]) : before[a][i];
        if (outs[a][i] != mean || params[a][i] != wanted)
          expect(false, where + ": element " + std::to_string(at));
      }
  });
});

const Test kOnePacket(
    "sparse: scatter, mask, encode and rollback; wrong indices change nothing", [] {
      std::mt19937 random(7);
      constexpr size_t kCount = 5'001;
      const Sent sent = some_of(random, kCount, 9);
      const size_t k = sent.indices.size();
      Floats out = numbers(random, kCount, 1, false), u = out, v = out, rest = out, wanted = out;
      auto& all = cpu_kernels();
      all.scatter_add({out.data(), kCount, Dtype::float32}, sent.packet(), Dtype::float32, 3, {});
      all.momentum_mask(u.data(), v.data(), {sent.indices, kCount, Dtype::float32}, {});
      std::vector<std::byte> bytes(codec::raw_packet_bytes(k, Dtype::bfloat16));
      all.encode(sent.packet(),
                 {.count = kCount,
                  .dtype = Dtype::float32,
                  .value_dtype = Dtype::bfloat16,
                  .residual = rest.data(),
                  .out = bytes.data()},
                 {});
      expect_equal(codec::read_packet_header(bytes).k, k, "the header's k");
      for (size_t i = 0; i < k; ++i) {
        const auto at = static_cast<size_t>(sent.indices[i]);
        const float written = cpu::widen_bfloat16(cpu::narrow_bfloat16(sent.values[i]));
        expect_equal(out[at], wanted[at] + 3 * sent.values[i], "scatter_add");
        expect(u[at] == 0 && v[at] == 0, "momentum_mask");
        expect_equal(rest[at], wanted[at] + (sent.values[i] - written), "encode: residual");
      }
      Places indices = sent.indices;
      Floats values = sent.values, u_values = numbers(random, k, 1, false);
      const std::vector<DgcPiece> pieces{{nullptr, nullptr, u.data(), v.data(), 2'000},
                                         {nullptr, nullptr, &u[2'000], &v[2'000], kCount - 2'000}};
      const std::vector<DgcSelection> selections{
          {2, k, 0, indices.data(), values.data(), u_values.data()}};
      all.dgc_rollback({pieces, selections, Dtype::float32}, nullptr, {});
      for (size_t i = 0; i < k; ++i) {
        const auto at = static_cast<size_t>(indices[i]);
        expect(v[at] == values[i] && u[at] == u_values[i], "dgc_rollback");
      }
      const Floats before = out;
      for (const Places& bad : {Places{3, 2}, Places{1, 1}, Places{-1, 2}, Places{2, kCount}}) {
        const codec::Packet packet{bad.data(), values.data(), bad.size()};
        expect_throws<InvalidArgument>([&] {
          all.scatter_add({out.data(), kCount, Dtype::float32}, packet, Dtype::float32, 1, {});
        });
      }
      expect(same(out, before), "refused, but changed");
    });

// ---- quantized ----------------------------------------------------------------------------------

const Test kQuantized(
    "sparse: quantized arrays have the same bits on every instruction set, in exact memory", [] {
      std::mt19937 random(9);
      for (const unsigned bits : {1u, 2u, 3u, 4u, 8u})
        for (const size_t count : {1, 7, 4095, 4097, 70'003}) {
          const Floats x = numbers(random, count), residual = numbers(random, count, 1, false);
          std::vector<Block> table;
          for (size_t at = 0; at < count; at += 4096)
            table.push_back({at, std::min<size_t>(4096, count - at)});
          const Blocks blocks{table, bits};
          std::vector<std::vector<std::byte>> first;
          on_each_isa([&](const std::string& where) {
            Floats copy = x, lost = residual, out = residual;
            std::vector<std::byte> packet(quantized_bytes(blocks));
            cpu_kernels().quantize({copy.data(), count, Dtype::float32}, blocks,
                                   {lost.data(), lost.data()}, packet.data(), {});
            cpu_kernels().dequantize(packet.data(), blocks,
                                     {.scale = 0.5f, .accumulate = true, .not_finite = nullptr},
                                     {out.data(), count, Dtype::float32}, {});
            std::vector<std::vector<std::byte>> found{packet};
            for (const Floats& floats : {lost, out}) {
              const auto bytes = std::as_bytes(std::span(floats));
              found.emplace_back(bytes.begin(), bytes.end());
            }
            if (first.empty()) first = found;
            expect(found == first, where);
          });
        }
    });

// ---- dense --------------------------------------------------------------------------------------

const Test kDense("sparse: norm, product and cast have the same bits on every instruction set", [] {
  std::mt19937 random(8);
  const Floats x = numbers(random, 200'003);
  std::vector<std::vector<std::byte>> first;
  on_each_isa([&](const std::string& where) {
    std::vector<std::vector<std::byte>> found;
    for (const Dtype to : {Dtype::float16, Dtype::bfloat16, Dtype::float64}) {
      found.emplace_back(x.size() * bytes_of(to));
      Floats copy = x;
      cpu_kernels().cast({copy.data(), x.size(), Dtype::float32},
                         {found.back().data(), x.size(), to}, {});
      const float factor = 0.3f;
      const double wide = 0.3;
      auto product = found.back();
      const void* const by = to == Dtype::float64 ? static_cast<const void*>(&wide) : &factor;
      cpu_kernels().multiply({product.data(), x.size(), to}, by, {});
      found.push_back(product);
    }
    const std::vector<Array> arrays{{found.back().data(), 0}, {found[2].data(), x.size()}};
    std::vector<std::byte> room(cpu_kernels().norm_workspace_bytes(arrays));
    found.emplace_back(2 * sizeof(double));
    cpu_kernels().norm(arrays, Dtype::bfloat16, reinterpret_cast<double*>(found.back().data()),
                       {room.data(), room.size()}, {});
    if (first.empty()) first = found;
    expect(found == first, where);
  });
});

}  // namespace
