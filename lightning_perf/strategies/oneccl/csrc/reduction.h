// How oneCCL reduces tensors: as which type, by which operation, and what is left to do.
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include <ATen/ATen.h>
#include <oneapi/ccl.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lightning_perf {

using at::ScalarType;
using at::Tensor;
using c10d::ReduceOp;

// How oneCCL reduces a tensor: maybe seen as another type, maybe divided afterwards.
struct Reduction {
  ccl::reduction operation;
  ccl::datatype type;
  ccl::reduction_fn function = nullptr;  // of bytes, where oneCCL has none; all_reduce only
  bool mean = false;
};

template <typename Operation>
void bitwise(const void* in, size_t count, void* inout, size_t* out_count, ccl::datatype,
             const ccl::fn_context*) {
  const auto* from = static_cast<const uint8_t*>(in);
  auto* to = static_cast<uint8_t*>(inout);
  for (size_t byte = 0; byte < count; ++byte) to[byte] = Operation()(to[byte], from[byte]);
  if (out_count) *out_count = count;
}

inline ccl::datatype type_of(ScalarType type, const char* name) {
  static const std::map<ScalarType, ccl::datatype> types = {
      {ScalarType::Char, ccl::datatype::int8},      {ScalarType::Byte, ccl::datatype::uint8},
      {ScalarType::Bool, ccl::datatype::uint8},     {ScalarType::Short, ccl::datatype::int16},
      {ScalarType::UInt16, ccl::datatype::uint16},  {ScalarType::Int, ccl::datatype::int32},
      {ScalarType::UInt32, ccl::datatype::uint32},  {ScalarType::Long, ccl::datatype::int64},
      {ScalarType::UInt64, ccl::datatype::uint64},  {ScalarType::Half, ccl::datatype::float16},
      {ScalarType::Float, ccl::datatype::float32},  {ScalarType::Double, ccl::datatype::float64},
      {ScalarType::BFloat16, ccl::datatype::bfloat16}};
  const auto found = types.find(type);
  TORCH_CHECK_VALUE(found != types.end(), "ccl: ", name, " was asked for with ", type,
                    ", which oneCCL cannot add up. Convert the tensor before.");
  return found->second;
}

inline Reduction reduction_of(const ReduceOp& asked, ScalarType type, const char* name) {
  const auto refuse = [&](const char* advice) {
    TORCH_CHECK_VALUE(false, "ccl: ", name, " was asked for with reduce operation ",
                      static_cast<int>(asked.op_), " of ", type, ", which makes no sense or is "
                      "not there. ", advice);
  };
  const bool is_bool = type == ScalarType::Bool;
  Reduction reduction{ccl::reduction::sum, type_of(type, name)};
  switch (asked.op_) {
    case ReduceOp::AVG:
      if (is_bool) refuse("Convert the tensor to numbers before.");
      reduction.mean = true;
      break;
    case ReduceOp::SUM:
      // As bytes, the sum of many would be none; this is what sums of booleans are in PyTorch.
      if (is_bool) reduction.operation = ccl::reduction::max;
      break;
    case ReduceOp::PRODUCT:
      reduction.operation = is_bool ? ccl::reduction::min : ccl::reduction::prod;
      break;
    case ReduceOp::MIN:
      reduction.operation = ccl::reduction::min;
      break;
    case ReduceOp::MAX:
      reduction.operation = ccl::reduction::max;
      break;
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      if (!at::isIntegralType(type, true)) refuse("Bits are those of integers.");
      reduction.operation = ccl::reduction::custom;
      reduction.type = ccl::datatype::uint8;
      reduction.function = asked.op_ == ReduceOp::BAND  ? bitwise<std::bit_and<uint8_t>>
                           : asked.op_ == ReduceOp::BOR ? bitwise<std::bit_or<uint8_t>>
                                                        : bitwise<std::bit_xor<uint8_t>>;
      break;
    default:
      refuse("Multiply before, and use SUM.");
  }
  return reduction;
}

inline void divide(const Tensor& tensor, int size) {
  if (at::isIntegralType(tensor.scalar_type(), false)) {
    tensor.div_(size, "trunc");  // Lightning averages counters, and expects integers
  } else {
    tensor.div_(size);
  }
}

}  // namespace lightning_perf
