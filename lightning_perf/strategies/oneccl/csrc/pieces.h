// Tensors as oneCCL needs them: in one piece of memory each.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "reduction.h"

namespace lightning_perf {

using Tensors = std::vector<Tensor>;

// A tensor as oneCCL needs it, one piece of memory, and the tensor it stands for.
struct Piece {
  Tensor given, memory;
  char* data() const { return static_cast<char*>(memory.data_ptr()); }
  void put_back() const {
    if (!memory.is_same(given)) given.copy_(memory);
  }
};

inline void require_dense(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.layout() == at::kStrided, "ccl: ", name,
                    " was asked for with a ", tensor.layout(), " tensor on ", tensor.device(),
                    ". It takes dense tensors on the CPU; choose the backend 'gloo' for sparse "
                    "ones, and 'cpu:ccl,cuda:nccl' for those of a GPU.");
}

inline Piece input(const Tensor& tensor, const char* name) {
  require_dense(tensor, name);
  return {tensor, tensor.resolve_conj().resolve_neg().contiguous()};
}

inline Piece output(const Tensor& tensor, const char* name) {
  require_dense(tensor, name);
  const bool is_one = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  return {tensor, is_one ? tensor : at::empty(tensor.sizes(), tensor.options())};
}

inline void require_each(const Tensors& tensors, int size, const char* name) {
  TORCH_CHECK_VALUE(static_cast<int>(tensors.size()) == size, "ccl: ", name, " was asked for with ",
                    tensors.size(), " tensors for ", size, " ranks.");
  for (const Tensor& tensor : tensors) require_dense(tensor, name);
}

inline const Tensor& only(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "ccl: ", name, " was asked for with ", tensors.size(),
                    " tensors; it takes one for each rank.");
  return tensors[0];
}

// Complex numbers can be added up as pairs of real ones.
inline Tensor numbers_of(const Piece& piece, const ReduceOp& operation) {
  const bool adds = operation.op_ == ReduceOp::SUM || operation.op_ == ReduceOp::AVG;
  return piece.memory.is_complex() && adds ? at::view_as_real(piece.memory) : piece.memory;
}

inline Tensor bytes_of(const Tensor& memory) { return memory.reshape({-1}).view(at::kByte); }

// One piece of memory, of which some bytes are for each rank, or from it.
struct Cut {
  Tensor memory;
  std::vector<size_t> counts;
  char* data() const { return static_cast<char*>(memory.data_ptr()); }
};

// All bytes are for one rank.
inline Cut whole(const Piece& piece, int rank, int size) {
  Cut cut{bytes_of(piece.memory), std::vector<size_t>(size, 0)};
  cut.counts[rank] = piece.memory.nbytes();
  return cut;
}

// Space for tensors, one from each rank.
inline Cut room_for(const Tensors& tensors) {
  Cut cut;
  size_t sum = 0;
  for (const Tensor& tensor : tensors) {
    cut.counts.push_back(tensor.nbytes());
    sum += tensor.nbytes();
  }
  cut.memory = at::empty(sum, at::kByte);
  return cut;
}

// Calls a function with each tensor and its bytes.
template <typename Function>
void for_each(const Cut& cut, const Tensors& tensors, Function function) {
  int64_t next = 0;
  for (size_t rank = 0; rank < tensors.size(); ++rank) {
    const int64_t bytes = cut.counts[rank];
    function(tensors[rank], cut.memory.narrow(0, next, bytes));
    next += bytes;
  }
}

// Copies of tensors, one for each rank.
inline Cut joined(const Tensors& tensors) {
  const Cut cut = room_for(tensors);
  for_each(cut, tensors, [](const Tensor& tensor, const Tensor& bytes) {
    bytes.copy_(bytes_of(tensor.resolve_conj().resolve_neg().contiguous()));
  });
  return cut;
}

inline void hand_out(const Cut& cut, const Tensors& tensors) {
  for_each(cut, tensors, [](const Tensor& tensor, const Tensor& bytes) {
    // A copy, since what has larger elements must not start anywhere.
    tensor.copy_(bytes.clone().view(tensor.scalar_type()).view(tensor.sizes()));
  });
}

}  // namespace lightning_perf
