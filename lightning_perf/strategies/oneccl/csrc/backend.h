// The backend "ccl" of torch.distributed for CPU tensors, on Intel's oneCCL.
//
// What only moves data moves bytes, of any type. `engine.h` runs it all.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "engine.h"
#include "pieces.h"
#include "reduction.h"

namespace lightning_perf {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Communicator = ccl::communicator;
using Events = std::vector<ccl::event>;

constexpr milliseconds kUnset{-1};  // of the options of a collective: the time-out of the group

inline ccl::event summed(const Tensor& numbers, const Reduction& reduction,
                  const Communicator& communicator) {
  auto attributes = ccl::create_operation_attr<ccl::allreduce_attr>();
  size_t count = numbers.numel();
  if (reduction.function) {
    attributes.set<ccl::allreduce_attr_id::reduction_fn>(reduction.function);
    count = numbers.nbytes();
  }
  return ccl::allreduce(numbers.data_ptr(), numbers.data_ptr(), count, reduction.type,
                        reduction.operation, communicator, attributes);
}

class CclBackend : public c10d::Backend {
 public:
  CclBackend(GroupPtr group)
      : c10d::Backend(group->rank, group->size), group_(std::move(group)) {}

  ~CclBackend() override {
    try {
      shutdown();
    } catch (const std::exception& error) {
      TORCH_WARN(error.what());
    }
  }

  // Frees the group once what was submitted is over.
  void shutdown() {
    if (group_->pid != getpid()) return;  // a forked process has no part in it
    // Callbacks of what is not over yet may be in Python.
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    Engine::get().close(group_);
  }

  const std::string getBackendName() const override { return "ccl"; }

  // The methods without `override` are not there in all versions of PyTorch.
  c10::intrusive_ptr<Options> getBackendOptions() {
    return c10::make_intrusive<Options>("ccl", milliseconds(group_->timeout_ms));
  }
  void setTimeout(milliseconds timeout) { group_->timeout_ms = timeout.count(); }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Piece piece = input(only(tensors, "broadcast"), "broadcast");
    const int root = options.rootRank;
    return submit(
        OpType::BROADCAST, "broadcast", tensors, tensors, options.timeout,
        [=](Events& events, const Communicator& communicator) {
          if (piece.memory.nbytes() == 0) return;
          events.push_back(ccl::broadcast(piece.data(), piece.memory.nbytes(),
                                          ccl::datatype::uint8, root, communicator));
        },
        [=, mine = getRank()] {
          if (root != mine) piece.put_back();
        });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    only(tensors, "all_reduce");
    return reduce_all(OpType::ALLREDUCE, tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Piece piece = input(only(tensors, "reduce"), "reduce");
    const Tensor numbers = numbers_of(piece, options.reduceOp);
    const auto reduction = reduction_of(options.reduceOp, numbers.scalar_type(), "reduce");
    const int root = options.rootRank, size = getSize();
    const bool mine = root == getRank();
    // Others than the root keep what they have.
    const Tensor result = mine ? numbers : numbers.clone();
    return submit(
        OpType::REDUCE, "reduce", tensors, tensors, options.timeout,
        [=](Events& events, const Communicator& communicator) {
          if (result.numel() == 0) return;
          events.push_back(
              reduction.function
                  ? summed(result, reduction, communicator)
                  : ccl::reduce(numbers.data_ptr(), result.data_ptr(), result.numel(),
                                reduction.type, reduction.operation, root, communicator));
        },
        [=] {
          if (!mine) return;
          if (reduction.mean) divide(result, size);
          piece.put_back();
        });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return gather_all(OpType::ALLGATHER, outputs, inputs, options);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    // Here the lists are by rank, and each holds one tensor for each input.
    std::vector<Tensors> by_input(inputs.size());
    for (const auto& of_rank : outputs) {
      TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "ccl: all_gather_coalesced was asked for "
                        "with ", inputs.size(), " inputs and ", of_rank.size(), " outputs.");
      for (size_t index = 0; index < inputs.size(); ++index) {
        by_input[index].push_back(of_rank[index]);
      }
    }
    return gather_all(OpType::ALLGATHER_COALESCED, by_input, inputs, options);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return gather_into(OpType::_ALLGATHER_BASE, outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return gather_into(OpType::COALESCED, outputs, inputs, options);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Tensor& out = only(outputs, "reduce_scatter");
    TORCH_CHECK_VALUE(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == getSize(),
                      "ccl: reduce_scatter takes one input for each of ", getSize(), " ranks.");
    Tensors flat;
    for (const Tensor& part : inputs[0]) {
      TORCH_CHECK_VALUE(part.numel() == out.numel(), "ccl: reduce_scatter was asked for with "
                        "inputs of ", part.numel(), " and an output of ", out.numel(),
                        " elements. All must be alike: pad them.");
      require_dense(part, "reduce_scatter");
      flat.push_back(part.reshape({-1}));
    }
    Tensors all{at::cat(flat)};
    return scatter_reduced(OpType::REDUCE_SCATTER, outputs, all, options);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return scatter_reduced(OpType::_REDUCE_SCATTER_BASE, outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return scatter_reduced(OpType::COALESCED, outputs, inputs, options);
  }

  WorkPtr alltoall_base(Tensor& output_, Tensor& input_, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    const char* name = "all_to_all_single";
    const Piece in = input(input_, name), out = output(output_, name);
    return exchange(OpType::ALLTOALL_BASE, name, {input_}, {output_}, options.timeout,
                    split(in, input_splits, name), split(out, output_splits, name),
                    [out] { out.put_back(); });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    require_each(inputs, getSize(), "all_to_all");
    require_each(outputs, getSize(), "all_to_all");
    const Cut receive = room_for(outputs);
    return exchange(OpType::ALLTOALL, "all_to_all", inputs, outputs, options.timeout,
                    joined(inputs), receive, [=] { hand_out(receive, outputs); });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const int root = options.rootRank;
    const Cut send = whole(input(only(inputs, "gather"), "gather"), root, getSize());
    if (root != getRank()) {
      return exchange(OpType::GATHER, "gather", inputs, {}, options.timeout, send, nothing());
    }
    TORCH_CHECK_VALUE(outputs.size() == 1, "ccl: gather takes one list of outputs.");
    const Tensors& results = outputs[0];
    require_each(results, getSize(), "gather");
    const Cut receive = room_for(results);
    return exchange(OpType::GATHER, "gather", inputs, results, options.timeout, send, receive,
                    [=] { hand_out(receive, results); });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const int root = options.rootRank;
    const Piece out = output(only(outputs, "scatter"), "scatter");
    Cut send = nothing();
    if (root == getRank()) {
      TORCH_CHECK_VALUE(inputs.size() == 1, "ccl: scatter takes one list of inputs.");
      require_each(inputs[0], getSize(), "scatter");
      send = joined(inputs[0]);
    }
    return exchange(OpType::SCATTER, "scatter", {}, outputs, options.timeout, send,
                    whole(out, root, getSize()), [out] { out.put_back(); });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return submit(OpType::BARRIER, "barrier", {}, {}, options.timeout,
                  [](Events& events, const Communicator& communicator) {
                    events.push_back(ccl::barrier(communicator));
                  });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    const Piece piece = input(only(tensors, "send"), "send");
    return transfer(OpType::SEND, "send", tensors, {}, peer, tag,
                    [=](Events& events, const Communicator& communicator) {
                      events.push_back(ccl::send(piece.data(), piece.memory.nbytes(),
                                                 ccl::datatype::uint8, peer, communicator));
                    });
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    const Piece piece = output(only(tensors, "recv"), "recv");
    return transfer(
        OpType::RECV, "recv", {}, tensors, peer, tag,
        [=](Events& events, const Communicator& communicator) {
          events.push_back(ccl::recv(piece.data(), piece.memory.nbytes(), ccl::datatype::uint8,
                                     peer, communicator));
        },
        [piece] { piece.put_back(); });
  }

 private:
  using Start = std::function<void(Events&, const Communicator&)>;
  using After = std::function<void()>;

  WorkPtr submit(OpType type, const char* name, const Tensors& inputs, const Tensors& outputs,
                 milliseconds timeout, Start start, After after = {}, int peer = -1) {
    auto job = std::make_shared<Job>();
    job->group = group_;
    job->work = c10::make_intrusive<Work>(getRank(), type, name, inputs, outputs);
    int64_t elements = 0;
    for (const Tensor& tensor : inputs.empty() ? outputs : inputs) elements += tensor.numel();
    job->what = c10::str(name, " of ", elements, " elements on ", group_->name);
    if (peer >= 0) job->what += c10::str(", with rank ", peer, " of it");
    else ++sequence_;
    job->timeout = timeout == kUnset ? milliseconds(group_->timeout_ms) : timeout;
    job->peer = peer;
    job->sends = type == OpType::SEND;
    job->start = std::move(start);
    job->after = std::move(after);
    Engine::get().submit(job);
    return job->work;
  }

  WorkPtr reduce_all(OpType type, Tensors& tensors, const c10d::AllreduceOptions& options) {
    const char* name = "all_reduce";
    struct Item {
      Piece piece;
      Tensor numbers;
      Reduction reduction;
    };
    std::vector<Item> items;
    for (const Tensor& tensor : tensors) {
      const Piece piece = input(tensor, name);
      const Tensor numbers = numbers_of(piece, options.reduceOp);
      const auto reduction = reduction_of(options.reduceOp, numbers.scalar_type(), name);
      if (numbers.numel() > 0) items.push_back({piece, numbers, reduction});
    }
    return submit(
        type, name, tensors, tensors, options.timeout,
        [=](Events& events, const Communicator& communicator) {
          for (const auto& [piece, numbers, reduction] : items) {
            events.push_back(summed(numbers, reduction, communicator));
          }
        },
        [=, size = getSize()] {
          for (const auto& [piece, numbers, reduction] : items) {
            if (reduction.mean) divide(numbers, size);
            piece.put_back();
          }
        });
  }

  WorkPtr gather_all(OpType type, const std::vector<Tensors>& outputs, const Tensors& inputs,
                     const c10d::AllgatherOptions& options) {
    const char* name = "all_gather";
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "ccl: ", name, " was asked for with ",
                      inputs.size(), " inputs and ", outputs.size(), " lists of outputs.");
    struct Item {
      Piece in;
      std::vector<Piece> out;
      std::vector<void*> buffers;
      std::vector<size_t> counts;
    };
    std::vector<Item> items;
    Tensors results;
    for (size_t index = 0; index < inputs.size(); ++index) {
      require_each(outputs[index], getSize(), name);
      Item item{input(inputs[index], name), {}, {}, {}};
      for (const Tensor& tensor : outputs[index]) {
        const Piece piece = output(tensor, name);
        item.out.push_back(piece);
        item.buffers.push_back(piece.data());
        item.counts.push_back(piece.memory.nbytes());
      }
      TORCH_CHECK_VALUE(item.counts[getRank()] == item.in.memory.nbytes(), "ccl: ", name,
                        " was asked for with an input of ", item.in.memory.nbytes(),
                        " bytes and an output for this rank, ", getRank(), ", of ",
                        item.counts[getRank()], ".");
      results.insert(results.end(), outputs[index].begin(), outputs[index].end());
      items.push_back(std::move(item));
    }
    return submit(
        type, name, inputs, results, options.timeout,
        [=](Events& events, const Communicator& communicator) {
          for (const auto& [in, out, buffers, counts] : items) {
            const auto is_empty = [](size_t count) { return count == 0; };
            if (std::all_of(counts.begin(), counts.end(), is_empty)) continue;
            events.push_back(ccl::allgatherv(in.data(), in.memory.nbytes(), buffers, counts,
                                             ccl::datatype::uint8, communicator));
          }
        },
        [=] {
          for (const auto& item : items) {
            for (const Piece& piece : item.out) piece.put_back();
          }
        });
  }

  WorkPtr gather_into(OpType type, const Tensors& outputs, const Tensors& inputs,
                      const c10d::AllgatherOptions& options) {
    const char* name = "all_gather_into_tensor";
    const auto pairs = matched(inputs, outputs, name, getSize(), 1);
    return submit(
        type, name, inputs, outputs, options.timeout,
        [=](Events& events, const Communicator& communicator) {
          for (const auto& [in, out] : pairs) {
            if (in.memory.nbytes() == 0) continue;
            events.push_back(ccl::allgather(in.data(), out.data(), in.memory.nbytes(),
                                            ccl::datatype::uint8, communicator));
          }
        },
        [=] {
          for (const auto& [in, out] : pairs) out.put_back();
        });
  }

  WorkPtr scatter_reduced(OpType type, const Tensors& outputs, const Tensors& inputs,
                          const c10d::ReduceScatterOptions& options) {
    const char* name = "reduce_scatter";
    const auto pairs = matched(inputs, outputs, name, 1, getSize());
    struct Item {
      Piece out;
      Tensor from, to;
      Reduction reduction;
    };
    std::vector<Item> items;
    for (const auto& [in, out] : pairs) {
      const Tensor from = numbers_of(in, options.reduceOp), to = numbers_of(out, options.reduceOp);
      const auto reduction = reduction_of(options.reduceOp, from.scalar_type(), name);
      items.push_back({out, reduction.function ? from.clone() : from, to, reduction});
    }
    return submit(
        type, name, inputs, outputs, options.timeout,
        [=](Events& events, const Communicator& communicator) {
          for (const auto& [out, from, to, reduction] : items) {
            if (to.numel() == 0) continue;
            events.push_back(
                reduction.function
                    ? summed(from, reduction, communicator)
                    : ccl::reduce_scatter(from.data_ptr(), to.data_ptr(), to.numel(),
                                          reduction.type, reduction.operation, communicator));
          }
        },
        [=, rank = getRank(), size = getSize()] {
          for (const auto& [out, from, to, reduction] : items) {
            // What has its own function is reduced as a whole.
            if (reduction.function) to.copy_(from.reshape({size, -1})[rank].view(to.sizes()));
            if (reduction.mean) divide(to, size);
            out.put_back();
          }
        });
  }

  WorkPtr exchange(OpType type, const char* name, const Tensors& inputs, const Tensors& outputs,
                   milliseconds timeout, const Cut& send, const Cut& receive, After after = {}) {
    return submit(
        type, name, inputs, outputs, timeout,
        [=](Events& events, const Communicator& communicator) {
          events.push_back(ccl::alltoallv(send.data(), send.counts, receive.data(), receive.counts,
                                          ccl::datatype::uint8, communicator));
        },
        std::move(after));
  }

  Cut nothing() const { return {at::empty(0, at::kByte), std::vector<size_t>(getSize(), 0)}; }

  WorkPtr transfer(OpType type, const char* name, const Tensors& inputs, const Tensors& outputs,
                   int peer, int tag, Start start, After after = {}) {
    TORCH_CHECK_VALUE(tag == 0, "ccl: ", name, " was asked for with tag ", tag,
                      ". Messages between two ranks arrive in order, and have no tags.");
    TORCH_CHECK_VALUE(peer >= 0 && peer < getSize() && peer != getRank(), "ccl: ", name,
                      " was asked for with rank ", peer, " of ", getSize(), ", on rank ",
                      getRank(), ".");
    return submit(type, name, inputs, outputs, kUnset, std::move(start), std::move(after), peer);
  }

  // Cuts a tensor into rows for each rank: as told, or equally many.
  Cut split(const Piece& piece, const std::vector<int64_t>& rows, const char* name) {
    const int64_t total = piece.memory.dim() ? piece.memory.size(0) : 0;
    const auto told = rows.empty() ? std::vector<int64_t>(getSize(), total / getSize()) : rows;
    int64_t sum = 0;
    for (const int64_t part : told) sum += part;
    TORCH_CHECK_VALUE(static_cast<int>(told.size()) == getSize() && sum == total, "ccl: ", name,
                      " cannot split ", total, " rows among ", getSize(), " ranks as ", told, ".");
    Cut cut{bytes_of(piece.memory), {}};
    const size_t bytes = total ? piece.memory.nbytes() / total : 0;
    for (const int64_t part : told) cut.counts.push_back(part * bytes);
    return cut;
  }

  // Pairs inputs with outputs, so many times as large and of the same type.
  static std::vector<std::pair<Piece, Piece>> matched(const Tensors& inputs,
                                                      const Tensors& outputs, const char* name,
                                                      int times_in, int times_out) {
    TORCH_CHECK_VALUE(inputs.size() == outputs.size(), "ccl: ", name, " was asked for with ",
                      inputs.size(), " inputs and ", outputs.size(), " outputs.");
    std::vector<std::pair<Piece, Piece>> pairs;
    for (size_t index = 0; index < inputs.size(); ++index) {
      const Tensor &in = inputs[index], &out = outputs[index];
      TORCH_CHECK_VALUE(in.scalar_type() == out.scalar_type() &&
                            in.numel() * times_in == out.numel() * times_out,
                        "ccl: ", name, " was asked for with an input of ", in.numel(), " ",
                        in.scalar_type(), " and an output of ", out.numel(), " ",
                        out.scalar_type(), ", among ", std::max(times_in, times_out), " ranks.");
      pairs.emplace_back(input(in, name), output(out, name));
    }
    return pairs;
  }

  const GroupPtr group_;
  uint64_t sequence_ = 0;
};

}  // namespace lightning_perf
