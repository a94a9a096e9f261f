#!/bin/bash
# A real Slurm on loopback, without systemd: `slurm.sh up FOLDER NODES PORT`, `slurm.sh down FOLDER`.
set -eu
folder=$2
export SLURM_CONF=$folder/slurm.conf

up() {
  nodes=$1 port=$2 host=$(hostname -s)
  mkdir -p "$folder"/{munge,state,spool,log}
  chmod 755 "$folder" "$folder/munge"
  dd if=/dev/urandom of="$folder/munge/key" bs=128 count=1 status=none
  chmod 600 "$folder/munge/key"
  munged --key-file="$folder/munge/key" --socket="$folder/munge/sock" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" --force
  cat > "$SLURM_CONF" <<END
ClusterName=elche
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
InactiveLimit=0
KillWait=60
MinJobAge=2
MessageTimeout=5
PropagateResourceLimits=NONE
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=p Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP GraceTime=20
PartitionName=urgent Nodes=n[1-$nodes] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
END
  slurmctld -f "$SLURM_CONF"
  for number in $(seq "$nodes"); do
    mkdir -p "$folder/spool/n$number"
    slurmd -f "$SLURM_CONF" -N "n$number"
  done
  for _ in $(seq 100); do
    [ "$(sinfo -h -N -p p -o %T 2>/dev/null | grep -c '^idle$')" = "$nodes" ] && return
    sleep 0.1
  done
  sinfo -N -l
  return 1
}

down() {
  scancel -f --user="$(id -un)" 2>/dev/null || :
  sleep 0.5
  pids=$(cat "$folder"/slurmd-*.pid "$folder/slurmctld.pid" "$folder/munge/pid" 2>/dev/null)
  kill $pids 2>/dev/null || :
  for _ in $(seq 100); do kill -0 $pids 2>/dev/null || return 0; sleep 0.1; done
}

"$1" "${@:3}"
