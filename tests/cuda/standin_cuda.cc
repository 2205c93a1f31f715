// A libcuda for tests: the functions that csrc/gpu/cuda_driver.cc uses, on
// devices that are not there. It checks what CUDA checks (contexts, handles,
// code, symbols, shared memory, tensor maps) and hands launches to a function
// of the test's. Built by conftest.py.

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "standin.h"

namespace {

enum : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchFailure = 719,
};

constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE",
     "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kLaunchFailure, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

constexpr uint16_t kNvidiaGpu = 190;
constexpr unsigned kMaxSharedBytes = 227 << 10;

struct Context {
  int device;
};
Context contexts[16];
thread_local std::vector<Context*> current;

bool IsDevice(int device) { return device >= 0 && device < device_count; }

bool IsContext(const void* context) {
  return context >= &contexts[0] && context <= &contexts[15];
}

// What a map holds, for the test to read.
struct TensorMap {
  uint64_t base;
  uint64_t sizes[5];
  uint64_t strides[4];
  uint32_t box[5];
  uint8_t type;
  uint8_t swizzle;
};
constexpr size_t kTensorMapBytes = 128;
static_assert(sizeof(TensorMap) <= kTensorMapBytes);

// What a launch was given, one after the other; maps for attention alone.
struct Parameters {
  uint8_t args[160];
  uint8_t maps[3][kTensorMapBytes];
};
constexpr size_t kQuantizeBytes = 80;

// Bytes of an element; 0 for a type that the kernels do not take.
int ElementBytes(int type) {
  return type == 0 ? 1 : type == 6 || type == 9 ? 2 : 0;
}

}  // namespace

// Contexts that the thread has pushed and not popped.
EXPORT int standin_contexts() { return static_cast<int>(current.size()); }

// CUDA's side.

EXPORT int cuGetErrorName(int error, const char** name) {
  const ErrorText* entry = Find(kErrors, error);
  *name = entry ? entry->name : nullptr;
  return entry ? kSuccess : kInvalidValue;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  const ErrorText* entry = Find(kErrors, error);
  *text = entry ? entry->text : nullptr;
  return entry ? kSuccess : kInvalidValue;
}

EXPORT int cuInit(unsigned flags) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuInit")) return error;
  if (flags != 0) return kInvalidValue;
  return device_count > 0 ? kSuccess : kNoDevice;
}

EXPORT int cuDeviceGetCount(int* count) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuDeviceGetCount")) return error;
  *count = device_count;
  return kSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuDeviceGetAttribute")) return error;
  if (!IsDevice(device)) return kInvalidDevice;
  const int capability = std::stoi(arch.substr(arch.find('_') + 1));
  switch (attribute) {
    case 16:
      *value = compute_units;
      return kSuccess;
    case 75:
      *value = capability / 10;
      return kSuccess;
    case 76:
      *value = capability % 10;
      return kSuccess;
  }
  return kInvalidValue;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuDevicePrimaryCtxRetain")) return error;
  if (!IsDevice(device)) return kInvalidDevice;
  contexts[device].device = device;
  *context = &contexts[device];
  return kSuccess;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuCtxPushCurrent_v2")) return error;
  if (!IsContext(context)) return kInvalidContext;
  current.push_back(static_cast<Context*>(context));
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

EXPORT int cuCtxGetDevice(int* device) {
  if (current.empty()) return kInvalidContext;
  *device = current.back()->device;
  return kSuccess;
}

EXPORT int cuStreamGetCtx(void* stream, void** context) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuStreamGetCtx")) return error;
  if (stream == nullptr) {
    if (current.empty()) return kInvalidContext;
    *context = current.back();
    return kSuccess;
  }
  if (!Owns(streams, stream)) return kInvalidHandle;
  const int device = static_cast<const Stream*>(stream)->device;
  contexts[device].device = device;
  *context = &contexts[device];
  return kSuccess;
}

EXPORT int cuModuleLoadData(void** module, const void* code) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuModuleLoadData")) return error;
  if (current.empty()) return kInvalidContext;
  *module = AddModule(current.back()->device, code, kNvidiaGpu);
  return *module == nullptr ? kInvalidImage : kSuccess;
}

EXPORT int cuModuleGetFunction(void** function, void* module,
                               const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuModuleGetFunction")) return error;
  if (!Owns(modules, module)) return kInvalidHandle;
  const auto* from = static_cast<const Module*>(module);
  if (current.empty() || from->device != current.back()->device) {
    return kInvalidContext;
  }
  *function = AddFunction(from, name);
  return *function == nullptr ? kNotFound : kSuccess;
}

EXPORT int cuFuncSetAttribute(void* handle, int attribute, int value) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("cuFuncSetAttribute")) return error;
  if (!Owns(functions, handle)) return kInvalidHandle;
  constexpr int kMaxDynamicSharedBytes = 8;
  if (attribute != kMaxDynamicSharedBytes || value < 0 ||
      value > static_cast<int>(kMaxSharedBytes)) {
    return kInvalidValue;
  }
  static_cast<Function*>(handle)->shared_limit = value;
  return kSuccess;
}

EXPORT int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y,
                          unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared_bytes, void* stream,
                          void** params, void** extra) {
  const Function* function = static_cast<const Function*>(handle);
  int device;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (int error = Wanted("cuLaunchKernel")) return error;
    if (!Owns(functions, handle)) return kInvalidHandle;
    if (current.empty()) return kInvalidContext;
    device = current.back()->device;
    if (function->module->device != device ||
        (stream != nullptr &&
         (!Owns(streams, stream) ||
          static_cast<const Stream*>(stream)->device != device))) {
      return kInvalidHandle;
    }
    if (shared_bytes > function->shared_limit) return kInvalidValue;
  }
  const unsigned grid[] = {grid_x, grid_y, grid_z};
  const unsigned block[] = {block_x, block_y, block_z};
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || block[i] == 0) return kInvalidValue;
  }
  if (grid_x > 0x7fffffff || uint64_t{block_x} * block_y * block_z > 1024 ||
      params == nullptr || extra != nullptr) {
    return kInvalidValue;
  }
  const LaunchCallback callback = launch_callback;
  if (callback == nullptr) return kLaunchFailure;
  const std::vector<char>& code = function->module->code;
  // The driver knows from the code how many parameters a kernel takes.
  const auto is = [function](const char* kernels) {
    return function->name.rfind(kernels, 0) == 0;
  };
  Parameters given = {};
  size_t size = is("zyfa_quantize") ? kQuantizeBytes : sizeof(given.args);
  std::memcpy(given.args, params[0], size);
  if (is("zyfa_attention")) {
    for (int i = 0; i < 3; ++i) {
      std::memcpy(given.maps[i], params[1 + i], kTensorMapBytes);
    }
    size = sizeof(given);
  }
  return callback(device, code.data(), code.size(), function->name.c_str(),
                  grid, block, &given, size, stream, shared_bytes);
}

// The limits are those of cuTensorMapEncodeTiled's description.
EXPORT int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank,
                                  void* base, const uint64_t* sizes,
                                  const uint64_t* strides, const uint32_t* box,
                                  const uint32_t* element_strides,
                                  int interleave, int swizzle, int promotion,
                                  int fill) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (int error = Wanted("cuTensorMapEncodeTiled")) return error;
  }
  const auto address = [](const void* x) {
    return reinterpret_cast<uintptr_t>(x);
  };
  const int bytes = ElementBytes(type);
  if (bytes == 0 || rank != 5 || address(map) % 64 != 0 || base == nullptr ||
      address(base) % 16 != 0 || interleave != 0 || promotion < 0 ||
      promotion > 3 || fill != 0 || (swizzle != 2 && swizzle != 3) ||
      box[0] * bytes > (swizzle == 2 ? 64u : 128u) ||
      box[0] * bytes % 16 != 0) {
    return kInvalidValue;
  }
  for (int i = 0; i < 5; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 ||
        box[i] > 256 || element_strides[i] != 1) {
      return kInvalidValue;
    }
  }
  for (int i = 0; i < 4; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40) {
      return kInvalidValue;
    }
  }
  TensorMap made = {};
  made.base = address(base);
  std::memcpy(made.sizes, sizes, sizeof(made.sizes));
  std::memcpy(made.strides, strides, sizeof(made.strides));
  std::memcpy(made.box, box, sizeof(made.box));
  made.type = static_cast<uint8_t>(type);
  made.swizzle = static_cast<uint8_t>(swizzle);
  std::memset(map, 0, kTensorMapBytes);
  std::memcpy(map, &made, sizeof(made));
  return kSuccess;
}
