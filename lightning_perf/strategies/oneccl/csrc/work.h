// What a caller holds while its collective runs.
#pragma once

#include <exception>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lightning_perf {

class Work : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
       std::vector<at::Tensor> outputs)
      : c10d::Work(rank, type, title, inputs),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // Who waits for the work goes on before the callbacks of the future, which may take long.
  void succeed() {
    finish();
    future_->markCompleted(c10::IValue(outputs_));
  }

  void fail(const std::exception_ptr& error) {
    finish(error);
    future_->setError(error);
  }

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lightning_perf
