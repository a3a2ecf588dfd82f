// The CPU kernels of sparse training under the sanitizers: on every instruction set that
// runs here, with several threads and several callers, the same bits.
//
// Arrays have the exact length and are separate, so that the sanitizer sees an access outside.
// tests/unit/test_kernels.py and test_kernel_packets.py compare the results with the definitions.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "codec/packet.h"
#include "harness.h"
#include "instruction_sets.h"
#include "kernels/device_kernels.h"
#include "kernels/quantize.h"

namespace {

using namespace pycomm;
using namespace pycomm::kernels;

using Floats = std::vector<float>;
using Places = std::vector<int32_t>;
using Bytes = std::vector<std::byte>;

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

template <typename T>
void add(Bytes& to, const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  to.insert(to.end(), bytes.begin(), bytes.end());
}

// What a test writes, from the same random numbers each time.
using Body = std::function<Bytes(std::mt19937&)>;

void same_on_each_isa(const Body& body) {
  Bytes first;
  on_each_isa([&](const std::string& where) {
    std::mt19937 random(1);
    const Bytes found = body(random);
    if (first.empty()) first = found;
    expect(found == first, where);
  });
}

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

struct Output {
  explicit Output(size_t k) : indices(k), values(k), u_values(k) {}
  Places indices;
  Floats values, u_values;
};

// Steps of these tensors, with gradients of these sizes: what they write.
Bytes steps(std::mt19937& random, const std::vector<size_t>& counts, const How& how,
            const std::vector<float>& sizes) {
  std::vector<Floats> u, v, weight, grad;
  std::vector<std::vector<uint16_t>> halves;
  std::vector<Output> outputs;
  std::vector<DgcPiece> pieces;
  std::vector<DgcSelection> selections;
  for (const size_t count : counts) {
    for (auto* each : {&u, &v, &weight}) each->push_back(numbers(random, count, 1, false));
    grad.emplace_back(count);
    halves.emplace_back(count);
  }
  for (size_t t = 0; t < counts.size(); ++t) {
    const void* const given =
        how.grad == Dtype::float32 ? static_cast<void*>(grad[t].data()) : halves[t].data();
    pieces.push_back(
        {given, how.decay ? weight[t].data() : nullptr, u[t].data(), v[t].data(), counts[t]});
  }
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  for (const size_t count : how.together ? std::vector{total} : counts)
    outputs.emplace_back(std::min(count, count / 500 + 1));
  for (Output& o : outputs)
    selections.push_back({how.together ? counts.size() : 1, o.indices.size(), 5, o.indices.data(),
                          o.values.data(), o.u_values.data()});
  const DgcTables tables{pieces, selections, Dtype::float32};
  Bytes workspace(cpu_kernels().dgc_workspace_bytes(tables)), written;
  for (const float size : sizes) {
    for (size_t t = 0; t < counts.size(); ++t) {
      grad[t] = numbers(random, counts[t], size, !how.misleading);
      if (how.misleading) mislead(grad[t]);
      pieces[t].grad = grad[t].data();
      if (how.grad == Dtype::float32) continue;
      cpu_kernels().cast({grad[t].data(), counts[t], Dtype::float32},
                         {halves[t].data(), counts[t], how.grad}, {});
      pieces[t].grad = halves[t].data();
    }
    cpu_kernels().dgc_step({.tables = tables,
                            .grad_dtype = how.grad,
                            .weight_dtype = Dtype::float32,
                            .momentum = 0.9,
                            .weight_decay = how.decay ? 0.01 : 0,
                            .scale = 0.5,
                            .scales = nullptr,
                            .nesterov = how.nesterov,
                            .masking = how.masking,
                            .found_inf = nullptr,
                            .workspace = {workspace.data(), workspace.size()}},
                           {});
    for (const auto* each : {&u, &v})
      for (const Floats& x : *each) add(written, x);
    for (const Output& o : outputs) {
      add(written, o.indices);
      for (const Floats* each : {&o.values, &o.u_values}) add(written, *each);
    }
  }
  return written;
}

const std::vector<size_t> kRagged{0, 1, 63, 64, 65, 4097, 20'011};

const Test kSteps("sparse: steps of ragged tensors, every dtype and option", [] {
  for (const How& how :
       {How{}, How{.grad = Dtype::float16, .nesterov = true, .decay = true},
        How{.grad = Dtype::bfloat16, .masking = false}, How{.decay = true, .together = true},
        How{.misleading = true}, How{.nesterov = true, .masking = false, .together = true}})
    // Steady, a jump that the lower bound does not expect, and nothing new.
    same_on_each_isa(
        [&](std::mt19937& random) { return steps(random, kRagged, how, {0.1f, 0.1f, 9.f, 0.f}); });
});

// More than one part, so that threads work on the same selection.
const Test kParts("sparse: a step of several threads", [] {
  same_on_each_isa([](std::mt19937& random) {
    return steps(random, {700'001, 400'000}, {.together = true}, {0.1f, 5.f});
  });
});

const Test kCallers("sparse: several callers at once", [] {
  const auto call = [] {
    std::mt19937 random(3);
    return steps(random, {9'000, 1'050'000}, {}, {0.1f, 0.1f});
  };
  const Bytes alone = call();
  Bytes beside;
  std::thread other([&] { beside = call(); });
  const Bytes here = call();
  other.join();
  expect(here == alone && beside == alone, "a caller");
});

// ---- selection ----------------------------------------------------------------------------------

void add_topk(Bytes& to, Floats x, size_t k) {
  Places indices(k);
  Floats values(k), threshold(1);
  Bytes room(cpu_kernels().topk_workspace_bytes(x.size(), k, Dtype::float32));
  cpu_kernels().topk({x.data(), x.size(), Dtype::float32},
                     {.k = k,
                      .indices = indices.data(),
                      .values = values.data(),
                      .threshold = k == 0 ? nullptr : threshold.data(),
                      .workspace = {room.data(), room.size()}},
                     {});
  add(to, indices);
  add(to, values);
  add(to, threshold);
}

const Test kTopk("sparse: topk, at the ends of k and with ties", [] {
  same_on_each_isa([](std::mt19937& random) {
    Bytes found;
    for (const size_t count : {0, 1, 64, 65, 1023, 30'001})
      for (const size_t k : {size_t{0}, count / 1000, count / 3, count})
        add_topk(found, numbers(random, count), k);
    Floats sampled = numbers(random, 20'011, 1, false), rising(300'000);
    mislead(sampled);
    add_topk(found, sampled, 41);
    // Each replaces the least of the kept ones.
    for (size_t i = 0; i < rising.size(); ++i)
      rising[i] = std::bit_cast<float>(0x3f000000u + static_cast<uint32_t>(i));
    add_topk(found, rising, 100);
    add_topk(found, Floats(1'100'000, 0.5f), 700);
    add_topk(found, numbers(random, 1'100'000), 1100);
    return found;
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
  same_on_each_isa([](std::mt19937& random) {
    const std::vector<size_t> counts{5, 0, 700'003, 1, 600'000};
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    const std::vector<Sent> sent{some_of(random, total, 1000), some_of(random, total, 7), {}};
    std::vector<codec::Packet> packets;
    for (const Sent& s : sent) packets.push_back(s.packet());
    std::vector<Floats> outs, params;
    std::vector<Array> out_arrays, param_arrays;
    for (const size_t count : counts) {
      outs.push_back(Floats(count, 7));
      params.push_back(numbers(random, count, 1, false));
    }
    for (size_t a = 0; a < counts.size(); ++a) {
      out_arrays.push_back({outs[a].data(), counts[a]});
      param_arrays.push_back({params[a].data(), counts[a]});
    }
    cpu_kernels().decode_sum({out_arrays, Dtype::float32}, packets, Dtype::float32, 0.25, {});
    cpu_kernels().decode_update({param_arrays, Dtype::float32}, packets, Dtype::float32,
                                {.lr = 0.1, .scale = 0.25}, {});
    Bytes found;
    for (const auto* each : {&outs, &params})
      for (const Floats& x : *each) add(found, x);
    return found;
  });
});

const Test kOnePacket("sparse: scatter, mask, encode and rollback of one packet", [] {
  same_on_each_isa([](std::mt19937& random) {
    constexpr size_t kCount = 5'001;
    const Sent sent = some_of(random, kCount, 9);
    const size_t k = sent.indices.size();
    Floats out = numbers(random, kCount, 1, false), u = out, v = out, rest = out;
    auto& all = cpu_kernels();
    all.scatter_add({out.data(), kCount, Dtype::float32}, sent.packet(), Dtype::float32, 3, {});
    all.momentum_mask(u.data(), v.data(), {sent.indices, kCount, Dtype::float32}, {});
    Bytes bytes(codec::raw_packet_bytes(k, Dtype::bfloat16));
    all.encode(sent.packet(),
               {.count = kCount,
                .dtype = Dtype::float32,
                .value_dtype = Dtype::bfloat16,
                .residual = rest.data(),
                .out = bytes.data()},
               {});
    Places indices = sent.indices;
    Floats values = sent.values, u_values = numbers(random, k, 1, false);
    const std::vector<DgcPiece> pieces{{nullptr, nullptr, u.data(), v.data(), 2'000},
                                       {nullptr, nullptr, &u[2'000], &v[2'000], kCount - 2'000}};
    const std::vector<DgcSelection> selections{
        {2, k, 0, indices.data(), values.data(), u_values.data()}};
    all.dgc_rollback({pieces, selections, Dtype::float32}, nullptr, {});
    for (const Floats* each : {&out, &u, &v, &rest}) add(bytes, *each);
    return bytes;
  });
});

// ---- quantized ----------------------------------------------------------------------------------

const Test kQuantized("sparse: quantized arrays", [] {
  same_on_each_isa([](std::mt19937& random) {
    Bytes found;
    for (const unsigned bits : {1u, 2u, 3u, 4u, 8u})
      for (const size_t count : {1, 7, 4095, 4097, 70'003}) {
        Floats x = numbers(random, count), lost = numbers(random, count, 1, false), out = lost;
        std::vector<Block> table;
        for (size_t at = 0; at < count; at += 4096)
          table.push_back({at, std::min<size_t>(4096, count - at)});
        const Blocks blocks{table, bits};
        Bytes packet(quantized_bytes(blocks));
        cpu_kernels().quantize({x.data(), count, Dtype::float32}, blocks,
                               {lost.data(), lost.data()}, packet.data(), {});
        cpu_kernels().dequantize(packet.data(), blocks,
                                 {.scale = 0.5f, .accumulate = true, .not_finite = nullptr},
                                 {out.data(), count, Dtype::float32}, {});
        add(found, packet);
        add(found, lost);
        add(found, out);
      }
    return found;
  });
});

// ---- dense --------------------------------------------------------------------------------------

const Test kDense("sparse: norm, product and cast", [] {
  same_on_each_isa([](std::mt19937& random) {
    Floats x = numbers(random, 200'003);
    Bytes found;
    for (const Dtype to : {Dtype::float16, Dtype::bfloat16, Dtype::float64}) {
      Bytes cast(x.size() * bytes_of(to));
      cpu_kernels().cast({x.data(), x.size(), Dtype::float32}, {cast.data(), x.size(), to}, {});
      add(found, cast);
      const float factor = 0.3f;
      const double wide = 0.3;
      const void* const by = to == Dtype::float64 ? static_cast<const void*>(&wide) : &factor;
      cpu_kernels().multiply({cast.data(), x.size(), to}, by, {});
      add(found, cast);
      if (to != Dtype::bfloat16) continue;
      const std::vector<Array> arrays{{cast.data(), 0}, {cast.data(), x.size()}};
      Bytes room(cpu_kernels().norm_workspace_bytes(arrays));
      std::vector<double> norms(2);
      cpu_kernels().norm(arrays, to, norms.data(), {room.data(), room.size()}, {});
      add(found, norms);
    }
    return found;
  });
});

}  // namespace
