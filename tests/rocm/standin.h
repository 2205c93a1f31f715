// What the stand-ins for GPU drivers share: devices, modules and streams that
// are not there, failures that a test asks for, and the test's side of it all.
// For one source file.

#ifndef ZYFA_TESTS_STANDIN_H_
#define ZYFA_TESTS_STANDIN_H_

#include <elf.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct ErrorText {
  int code;
  const char* name;
  const char* text;
};

template <size_t kCount>
const ErrorText* Find(const ErrorText (&errors)[kCount], int code) {
  for (const ErrorText& entry : errors) {
    if (entry.code == code) return &entry;
  }
  return nullptr;
}

struct Module {
  int device;
  std::vector<char> code;
};

struct Function {
  const Module* module;
  std::string name;
  unsigned shared_limit = 48 << 10;  // of CUDA
};

struct Stream {
  int device;
};

using LaunchCallback = int (*)(int device, const void* code, size_t code_size,
                               const char* kernel, const unsigned* grid,
                               const unsigned* block, const void* args,
                               size_t args_size, void* stream,
                               unsigned shared_bytes);

std::mutex mutex;
int device_count = 0;
int compute_units = 0;
std::string arch;
std::map<std::string, int> failures;
std::map<int, int> load_counts;
std::vector<std::unique_ptr<Module>> modules;
std::vector<std::unique_ptr<Function>> functions;
std::vector<std::unique_ptr<Stream>> streams;
std::atomic<LaunchCallback> launch_callback = nullptr;

// The error that the test wants of a call; 0: none.
int Wanted(const char* call) {
  const auto found = failures.find(call);
  return found == failures.end() ? 0 : found->second;
}

template <class T>
bool Owns(const std::vector<std::unique_ptr<T>>& all, const void* handle) {
  return std::any_of(all.begin(), all.end(),
                     [handle](const auto& x) { return x.get() == handle; });
}

// Bytes of an ELF file for a machine, 0 for anything else.
size_t CodeSize(const void* code, uint16_t machine) {
  Elf64_Ehdr header;
  std::memcpy(&header, code, sizeof(header));
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_machine != machine) {
    return 0;
  }
  size_t size = std::max<size_t>(
      header.e_shoff + size_t{header.e_shnum} * header.e_shentsize,
      header.e_phoff + size_t{header.e_phnum} * header.e_phentsize);
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section,
                static_cast<const char*>(code) + header.e_shoff +
                    size_t(i) * header.e_shentsize,
                sizeof(section));
    if (section.sh_type != SHT_NOBITS) {
      size = std::max<size_t>(size, section.sh_offset + section.sh_size);
    }
  }
  return size;
}

// Null for code that is not of the machine.
Module* AddModule(int device, const void* code, uint16_t machine) {
  const size_t size = CodeSize(code, machine);
  if (size == 0) return nullptr;
  const char* bytes = static_cast<const char*>(code);
  modules.push_back(std::make_unique<Module>(
      Module{device, std::vector<char>(bytes, bytes + size)}));
  ++load_counts[device];
  return modules.back().get();
}

// Null where the code has no such symbol.
Function* AddFunction(const Module* module, const char* name) {
  // The name with the zero that ends it, as in the table of names.
  const auto found = std::search(module->code.begin(), module->code.end(), name,
                                 name + std::strlen(name) + 1);
  if (found == module->code.end()) return nullptr;
  functions.push_back(std::make_unique<Function>(Function{module, name}));
  return functions.back().get();
}

}  // namespace

EXPORT void standin_set_devices(int count, const char* name, int units) {
  std::lock_guard<std::mutex> lock(mutex);
  device_count = count;
  arch = name;
  compute_units = units;
}

// Makes a function return an error; 0: work again.
EXPORT void standin_fail(const char* call, int error) {
  std::lock_guard<std::mutex> lock(mutex);
  failures[call] = error;
}

EXPORT void standin_set_launch(LaunchCallback callback) {
  launch_callback = callback;
}

// Modules loaded on a device so far.
EXPORT int standin_loads(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return load_counts[device];
}

// A stream of a device.
EXPORT void* standin_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(std::make_unique<Stream>(Stream{device}));
  return streams.back().get();
}

#endif  // ZYFA_TESTS_STANDIN_H_
