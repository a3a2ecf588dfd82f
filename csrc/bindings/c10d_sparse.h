// The sum of sparse tensors over all ranks: gathers the elements of every rank, then adds them.
//
//   element counts and shapes   all_gather of one row of numbers
//   indices and values          two all_gathers, with each rank's number of elements
//   the sum                     the same elements in the same order on every rank: same bits
//
// Transmits the elements of all ranks, so it pays only if tensors are very sparse.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/c10d_verbs.h"

namespace pycomm::bindings {

class SparseSum {
 public:
  // The row that ranks exchange first: number of elements, indexed dimensions, all dimensions,
  // sizes.
  static constexpr int64_t kRow = 32;

  SparseSum(const Job& job, RankSlot slot, const at::Tensor& tensor)
      : slot_(slot), target_(tensor), own_(tensor.coalesce()) {
    if (tensor.dim() + 3 > kRow) job.throw_unsupported("sparse tensors of at most 29 dimensions");
    rows_ = at::zeros({slot.size, kRow}, at::kLong);
    at::Tensor row = rows_[slot.rank];
    row[0] = own_._nnz();
    row[1] = own_.sparse_dim();
    row[2] = own_.dim();
    for (int64_t d = 0; d < own_.dim(); ++d) row[d + 3] = own_.size(d);
  }

  group::Call exchange_rows() const {
    group::Call call = moving(Operation::all_gather, rows_[slot_.rank]);
    call.input = bytes_at(rows_[slot_.rank]);
    call.output = bytes_at(rows_);
    return call;
  }

  // The remaining steps, once the rows are exchanged.
  void finish(group::Collectives& group, std::chrono::nanoseconds timeout) {
    BelowAutograd guard;
    check_shapes();
    const int64_t indexed = own_.sparse_dim();
    const auto each = gather(group, timeout, own_._indices().contiguous(), indexed);
    const at::Tensor values = own_._values().contiguous();
    const int64_t width = own_._nnz() == 0 ? dense_width() : values.numel() / own_._nnz();
    const auto parts = gather(group, timeout, values, width);
    Tensors indices, elements;
    for (size_t i = 0; i < each.size(); ++i) {
      indices.push_back(each[i].view({indexed, -1}));
      auto shape = values.sizes().vec();
      shape[0] = indices.back().size(1);
      elements.push_back(parts[i].view(shape));
    }
    target_.copy_(at::sparse_coo_tensor(at::cat(indices, 1), at::cat(elements, 0), own_.sizes(),
                                        own_.options())
                      .coalesce());
  }

 private:
  int64_t dense_width() const {
    int64_t width = 1;
    for (int64_t d = own_.sparse_dim(); d < own_.dim(); ++d) width *= own_.size(d);
    return width;
  }

  // All ranks have the same rows, so all of them throw.
  void check_shapes() const {
    for (int rank = 0; rank < slot_.size; ++rank)
      if (!rows_[rank].narrow(0, 1, kRow - 1).equal(rows_[slot_.rank].narrow(0, 1, kRow - 1)))
        throw Mismatch("pycomm all_reduce: the sparse tensor of rank " + std::to_string(rank) +
                           " has another shape than that of rank " + std::to_string(slot_.rank) +
                           "; no tensor was changed",
                       {.op = "all_reduce", .rank = slot_.rank, .peer = rank});
  }

  // By rank: its `mine`, which has `width` numbers for each element of the sparse tensor.
  Tensors gather(group::Collectives& group, std::chrono::nanoseconds timeout,
                 const at::Tensor& mine, int64_t width) const {
    const Element element = moved_as(mine);
    group::Call call{
        .operation = Operation::all_gather, .dtype = element.dtype, .timeout = timeout};
    std::vector<int64_t> sizes;
    int64_t all = 0;
    for (int rank = 0; rank < slot_.size; ++rank) {
      sizes.push_back(rows_[rank][0].item<int64_t>() * width);
      call.counts.push_back(static_cast<size_t>(sizes.back()) * element.parts);
      all += sizes.back();
    }
    const at::Tensor flat = at::empty({all}, mine.options());
    call.input = bytes_at(mine);
    call.output = bytes_at(flat);
    if (all > 0) group.run(call);
    return flat.split_with_sizes(sizes);
  }

  RankSlot slot_;
  at::Tensor target_, own_, rows_;
};

inline Job all_reduce_sparse(RankSlot slot, const Tensors& tensors,
                             const c10d::AllreduceOptions& opts) {
  Job job{.type = c10d::OpType::_ALLREDUCE_SPARSE,
          .title = "pycomm:all_reduce",
          .inputs = tensors,
          .outputs = tensors};
  const at::Tensor& tensor = only(job, tensors);
  if (!tensor.device().is_cpu() || tensor.layout() != at::kSparse)
    job.throw_unsupported(
        "sparse tensors must be in host memory, with the layout torch.sparse_coo");
  if (opts.reduceOp != c10d::ReduceOp::SUM)
    job.throw_unsupported("sparse tensors can be summed only");
  BelowAutograd guard;
  const auto sum = std::make_shared<SparseSum>(job, slot, tensor);
  job.calls.push_back(sum->exchange_rows());
  job.after = [sum](group::Collectives& group, std::chrono::nanoseconds timeout) {
    sum->finish(group, timeout);
  };
  return job;
}

}  // namespace pycomm::bindings
