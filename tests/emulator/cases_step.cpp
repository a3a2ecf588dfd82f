// topk and the DGC step against sorting and loops.
#include <algorithm>
#include <memory>

#include "cases.hpp"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

void try_topk(const std::vector<float>& x, size_t k, size_t skew) {
  Device<float> at(x, skew), values(k), threshold(1);
  Device<int32_t> indices(k);
  Device<std::byte> workspace(kernels().topk_workspace_bytes(x.size(), k, Dtype::float32));
  kernels().topk({at.at(), x.size(), Dtype::float32},
                 {.k = k,
                  .indices = indices.at(),
                  .values = values.at(),
                  .threshold = k == 0 ? nullptr : threshold.at(),
                  .workspace = {workspace.at(), workspace.size()}},
                 queue());
  const auto expected = largest(x, k);
  std::vector<float> there(k);
  for (size_t i = 0; i < k; ++i) there[i] = x[static_cast<size_t>(expected[i])];
  const std::string which = "topk " + std::to_string(k) + " of " + std::to_string(x.size());
  check(indices.read() == expected, which + ": indices");
  check(same_bits(values.read(), there), which + ": values");
}

// One tensor of a step, on the device and as the reference has it.
struct Tensor {
  Tensor(std::mt19937& random, size_t count, size_t skew)
      : u(numbers(random, count)),
        v(numbers(random, count)),
        weight(numbers(random, count)),
        grad(count),
        on_device(count, weight, u, v, skew) {}

  std::vector<float> u, v, weight, grad;
  struct Arrays {
    Arrays(size_t count, const std::vector<float>& w, const std::vector<float>& u_at,
           const std::vector<float>& v_at, size_t skew)
        : grad(count, skew), weight(w, skew), u(u_at, skew), v(v_at, skew) {}
    Device<float> grad, weight, u, v;
  } on_device;
};

struct Setting {
  bool nesterov, decay, masking, model;
};

void reference(Tensor& t, const Setting& how) {
  for (size_t i = 0; i < t.u.size(); ++i) {
    float x = 0.5f * t.grad[i];
    if (how.decay) x = std::fma(0.01f, t.weight[i], x);
    if (how.nesterov) {
      t.u[i] = 0.9f * (t.u[i] + x);
      t.v[i] = t.v[i] + (t.u[i] + x);
    } else {
      t.u[i] = std::fma(0.9f, t.u[i], x);
      t.v[i] = t.v[i] + t.u[i];
    }
  }
}

// The selections of a step: one for each tensor, or one for all of them.
struct Steps {
  Steps(std::mt19937& r, const std::vector<size_t>& counts, const Setting& setting)
      : random(r), how(setting) {
    size_t total = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      tensors.emplace_back(std::make_unique<Tensor>(random, counts[i], i % 2));
      total += counts[i];
    }
    for (const auto& t : tensors) {
      auto& d = t->on_device;
      pieces.push_back({d.grad.at(), d.weight.at(), d.u.at(), d.v.at(), t->u.size()});
    }
    const size_t groups = how.model ? 1 : counts.size();
    for (size_t i = 0; i < groups; ++i) {
      const size_t count = how.model ? total : counts[i], k = std::min(count, count / 100 + 1);
      outputs.push_back(std::make_unique<Output>(k));
      auto& o = *outputs.back();
      selections.push_back({how.model ? counts.size() : 1, k, i * 7, o.indices.at(), o.values.at(),
                            o.u_values.at()});
    }
    workspace = std::make_unique<Device<std::byte>>(kernels().dgc_workspace_bytes(tables()));
    workspace->clear();
  }
  struct Output {
    explicit Output(size_t k) : indices(k), values(k), u_values(k) {}
    Device<int32_t> indices;
    Device<float> values, u_values;
  };
  kernels::DgcTables tables() const { return {pieces, selections, Dtype::float32}; }

  void run(float size, bool skipped) {
    new_gradients(size, skipped);
    enqueue();
    compare_all(skipped);
  }

  // One step captured in a graph, which is then launched once for each size.
  void replay(const std::vector<float>& sizes) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t steps = nullptr;
    check_cuda(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
    enqueue();
    check_cuda(cudaStreamEndCapture(stream(), &graph));
    check_cuda(cudaGraphInstantiate(&steps, graph, 0));
    int number = 0;
    for (const float size : sizes) {
      const bool skipped = ++number == 3;
      new_gradients(size, skipped);
      check_cuda(cudaGraphLaunch(steps, stream()));
      compare_all(skipped);
    }
    check_cuda(cudaGraphExecDestroy(steps));
    check_cuda(cudaGraphDestroy(graph));
  }

  void new_gradients(float size, bool skipped) {
    found_inf.write({skipped ? 1.f : 0.f});
    for (auto& t : tensors) {
      t->grad = numbers(random, t->u.size(), size);
      if (size > 3 && !t->grad.empty()) t->grad[t->grad.size() / 2] = INFINITY;
      t->on_device.grad.write(t->grad);
      if (!skipped) reference(*t, how);
    }
  }

  void enqueue() {
    kernels().dgc_step({.tables = tables(),
                        .grad_dtype = Dtype::float32,
                        .weight_dtype = Dtype::float32,
                        .momentum = 0.9,
                        .weight_decay = how.decay ? 0.01 : 0,
                        .scale = 0.5,
                        .scales = nullptr,
                        .nesterov = how.nesterov,
                        .masking = how.masking,
                        .found_inf = found_inf.at(),
                        .workspace = {workspace->at(), workspace->size()}},
                       queue());
  }

  void compare_all(bool skipped) {
    size_t first = 0;
    for (size_t s = 0; s < selections.size(); ++s) {
      compare(s, first, skipped);
      first += selections[s].pieces;
    }
  }

  void compare(size_t s, size_t first, bool skipped) {
    const kernels::DgcSelection& selection = selections[s];
    std::vector<float> v, u;
    for (size_t i = first; i < first + selection.pieces; ++i) {
      v.insert(v.end(), tensors[i]->v.begin(), tensors[i]->v.end());
      u.insert(u.end(), tensors[i]->u.begin(), tensors[i]->u.end());
    }
    std::vector<int32_t> sent = largest(v, selection.k);
    std::vector<float> values(selection.k), u_values(selection.k);
    for (size_t i = 0; i < selection.k; ++i) {
      if (skipped) sent[i] = static_cast<int32_t>(i);
      const auto at = static_cast<size_t>(sent[i]);
      sent[i] += static_cast<int32_t>(selection.first);
      if (skipped) continue;
      values[i] = v[at];
      u_values[i] = u[at];
      if (how.masking || !std::isfinite(v[at])) u[at] = 0;
      v[at] = 0;
    }
    const std::string which = "selection " + std::to_string(s) + ": ";
    check(outputs[s]->indices.read() == sent, which + "indices");
    check(same_bits(outputs[s]->values.read(), values), which + "values");
    check(same_bits(outputs[s]->u_values.read(), u_values), which + "u_values");
    size_t at = 0;
    for (size_t i = first; i < first + selection.pieces; ++i) {
      Tensor& t = *tensors[i];
      for (size_t j = 0; j < t.u.size(); ++j, ++at) t.u[j] = u[at], t.v[j] = v[at];
      check(same_bits(t.on_device.u.read(), t.u), which + "u of tensor " + std::to_string(i));
      check(same_bits(t.on_device.v.read(), t.v), which + "v of tensor " + std::to_string(i));
    }
  }

  std::mt19937& random;
  Setting how;
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<std::unique_ptr<Output>> outputs;
  std::vector<kernels::DgcPiece> pieces;
  std::vector<kernels::DgcSelection> selections;
  std::unique_ptr<Device<std::byte>> workspace;
  Device<float> found_inf{1};
};

}  // namespace

void run_topk(std::mt19937& random) {
  for (const size_t count : {1, 33, 4097, 9000}) {
    const auto x = numbers(random, count);
    for (const size_t k : {size_t{1}, count / 50, count / 2, count})
      if (k > 0) try_topk(x, k, count % 2);
  }
  try_topk(numbers(random, 45000), 300, 0);          // through a sample
  try_topk(std::vector<float>(20000, 0.25f), 7, 1);  // only ties: more than the pool holds
}

void run_changed(std::mt19937& random) {
  const size_t count = 20000, k = count / 2;  // so many that `pack` reads all elements
  std::vector<float> x = numbers(random, count);
  const std::vector<float> before = x;
  unsigned grids = 0;
  emulator::options().before_grid = [&] {
    if (++grids == 4) std::fill(x.begin(), x.end(), 1000.f);  // `pack` finds that all are above
  };
  std::vector<int32_t> indices(count, -1);
  std::vector<float> values(count, -1.f);
  Device<std::byte> workspace(kernels().topk_workspace_bytes(count, k, Dtype::float32));
  kernels().topk({x.data(), count, Dtype::float32},
                 {.k = k,
                  .indices = indices.data(),
                  .values = values.data(),
                  .threshold = nullptr,
                  .workspace = {workspace.at(), workspace.size()}},
                 queue());
  finish();
  emulator::options().before_grid = {};
  check(grids == 4 && x != before, "the array changes before pack");
  const auto end = static_cast<ptrdiff_t>(k);
  check(std::all_of(indices.begin(), indices.begin() + end, [](int32_t i) { return i >= 0; }) &&
            std::all_of(values.begin(), values.begin() + end, [](float v) { return v == 1000; }),
        "topk of a changed array: k elements");
  check(std::all_of(indices.begin() + end, indices.end(), [](int32_t i) { return i == -1; }) &&
            std::all_of(values.begin() + end, values.end(), [](float v) { return v == -1; }),
        "topk of a changed array: nothing is written past them");
}

void run_brief(std::mt19937& random) {
  // More selections than blocks of a pass: a block turns from one to the next.
  Steps steps(random, {9000, 517, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39},
              {false, true, true, false});
  for (const float size : {0.1f, 0.1f, 5.f}) steps.run(size, false);
}

// The third launch is skipped; the tables of 300 tensors do not fit into one launch of `begin`.
void run_graph(std::mt19937& random) {
  Steps(random, {9000, 517}, {true, false, true, false}).replay({0.1f, 0.1f, 1.f, 5.f, 0.01f});
  Steps(random, std::vector<size_t>(300, 7), {false, true, true, false}).replay({0.1f, 1.f});
}

void run_infinity(std::mt19937& random) {
  Steps steps(random, {3000}, {false, false, false, false});
  for (const float size : {0.1f, 5.f, 0.1f}) steps.run(size, false);
}

void run_step(std::mt19937& random) {
  const std::vector<std::vector<size_t>> lists{{9000, 4096, 1, 517}, {0, 3, 8192}};
  int number = 0;
  for (const auto& list : lists)
    for (const Setting how : {Setting{false, false, true, false}, {true, true, false, true}}) {
      Steps steps(random, list, how);
      // Steady; none; a jump that the threshold does not expect; and down again, with a short
      // pool.
      for (const float size : {0.1f, 0.1f, 0.f, 5.f, 0.01f, 0.01f})
        steps.run(size, ++number % 4 == 3);
    }
  Steps large(random, {60000}, {false, false, true, false});
  for (const float size : {0.05f, 0.05f, 40.f, 0.05f}) large.run(size, false);
}

}  // namespace cases
