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

// The bytes for each rank, or from it; none where nothing is set.
struct Parts {
  explicit Parts(int size) : buffers(size, &nothing), counts(size, 0) {}
  void set(int rank, void* buffer, size_t bytes) {
    if (bytes == 0) return;
    buffers[rank] = buffer;
    counts[rank] = bytes;
  }
  std::vector<void*> buffers;
  std::vector<size_t> counts;
  inline static char nothing = 0;
};

}  // namespace lightning_perf
