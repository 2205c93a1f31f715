#include "csrc/ffi/cpu_handler.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

#include "csrc/cpu/dispatch.h"
#include "csrc/ffi/decode.h"
#include "csrc/ffi/work_queue.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {
namespace {

namespace ffi = xla::ffi;

// Scratch memory that a thread keeps between calls, so that short calls do not
// pay for fresh pages.
class ThreadWorkspace {
 public:
  // Null if there is no memory.
  void* Reserve(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      bytes_ = memory_ != nullptr ? bytes : 0;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t bytes_ = 0;
};

// This thread's scratch for `plan`, or null.
void* ReserveWorkspace(const cpu::AttentionPlan& plan) {
  thread_local ThreadWorkspace workspace;
  return workspace.Reserve(plan.workspace_bytes());
}

// What the caller shares with its helpers, who may outlive the call.
struct SharedWork {
  explicit SharedWork(const cpu::AttentionPlan& the_plan)
      : plan(the_plan), queue(the_plan.items()) {}

  // Works until no item is left.
  void Work(void* workspace) {
    WorkQueue::Cursor cursor(queue);
    for (int64_t item = cursor.Next(); item >= 0; item = cursor.Next()) {
      plan.Run(item, workspace);
    }
  }

  const cpu::AttentionPlan plan;
  WorkQueue queue;
};

ffi::Error Run(ffi::ThreadPool pool, const AttentionCall& call) {
  const auto params = DecodeAttention(call);
  if (params.has_error()) return params.error();
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const cpu::AttentionPlan plan(*params, threads);
  if (plan.items() == 0) return ffi::Error::Success();
  void* workspace = ReserveWorkspace(plan);
  if (workspace == nullptr) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "zyfa_attention: no memory for " +
                          std::to_string(plan.workspace_bytes()) +
                          " bytes of scratch");
  }
  const auto work = std::make_shared<SharedWork>(plan);
  const int64_t helpers = std::min(threads, plan.items()) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    pool.Schedule([work] {
      void* own = ReserveWorkspace(work->plan);
      if (own != nullptr) work->Work(own);
    });
  }
  work->Work(workspace);
  work->queue.WaitUntilFinished();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_Error* CpuAttention(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = AttentionHandler<ffi::ThreadPool>(Run).release();
  return handler->Call(call_frame);
}

}  // namespace zyfa
