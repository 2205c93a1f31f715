// Which instruction set runs a call, and how the call is cut into work items.

#ifndef ZYFA_CPU_DISPATCH_H_
#define ZYFA_CPU_DISPATCH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/cpu/target.h"

namespace zyfa::cpu {

// Best first. A compiled target is usable if this machine has its instructions.
const std::vector<const Target*>& CompiledTargets();
const std::vector<const Target*>& UsableTargets();

// The usable target of that name, or null.
const Target* FindTarget(const std::string& name);

// Calls run on `target` from now on, or on the next one below it that takes
// their dtype; null: the best.
void ForceTarget(const Target* target);

// A call cut into items that may run in any order, on any threads, once each.
// The result does not depend on how a call is cut. Holds the params by value.
class AttentionPlan {
 public:
  // Cut for up to `threads` threads.
  AttentionPlan(const AttentionParams& params, int64_t threads);

  int64_t items() const { return items_; }

  // Bytes of scratch, aligned to 64, that each thread brings.
  size_t workspace_bytes() const { return workspace_bytes_; }

  // Items are numbered from the longest to the shortest, for causal attention.
  void Run(int64_t item, void* workspace) const;

 private:
  AttentionParams params_;
  const Target* target_;
  int64_t rows_;       // rows per key/value head
  int64_t tile_rows_;  // rows per item
  int64_t items_;
  size_t workspace_bytes_;
};

// The target's own FP8 probabilities, for tests.
void RunFp8SoftmaxBlock(const Target& target, const Fp8SoftmaxBlock& block);

}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_DISPATCH_H_
